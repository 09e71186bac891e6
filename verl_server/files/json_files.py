"""JSON files that users, trainers and earlier runs wrote: read, parsed and converted, or refused by file and fault.

Every reader of such a file uses these functions. So each fault that a file can have (unreadable, cut off, binary,
nested too deeply, numbers or text beyond what a type holds) is a `BadRequestError` that names the file, and never a
traceback.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_server.errors import BadRequestError

T = TypeVar("T")

_DEEPEST = 200
"""Most levels of lists and objects. The encoders for HTTP accept 254."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise BadRequestError, which names the file, if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadRequestError(f"Cannot read {path}: {error}") from error


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise BadRequestError, which names the file, if it cannot be read."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{path} is not a text in UTF-8: {error}") from None


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (FILE:LINE, line) of a file. Raise BadRequestError, which names the file, if it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}:{number}", line
    except (OSError, ValueError) as error:
        raise BadRequestError(f"Cannot read {path}: {error}") from error


def whole_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the `numbered_lines` of a file up to a line without an end, which an interruption cut off.

    Yield nothing if there is no file.
    """
    try:
        yield from itertools.takewhile(lambda found: found[1].endswith(b"\n"), numbered_lines(path))
    except BadRequestError as error:
        # Not `path.exists()` before: the writer of a bounded file may remove it in between.
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise BadRequestError, which names the file, if there is no such object."""
    content = parse_json(read_bytes(path), str(path))
    if not isinstance(content, dict):
        raise BadRequestError(f"{path} does not contain a JSON object.")
    return content


def parse_json(data: bytes | str, where: str) -> Any:
    """Return a JSON value. Raise BadRequestError, which names `where`, for text that is not JSON, lone surrogates and
    more than 200 levels."""
    try:
        content = json.loads(data)
        _check_depth(content)
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"{where} is not valid JSON: a text has a lone surrogate: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{where} is not valid JSON: {error}") from None
    return content


def decode_json(data: bytes, kind: type[T], where: str) -> T:
    """Return a JSON value of a type. Raise BadRequestError, which names `where` and the key, if it has another type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequestError(f"{where}: {error}") from None


def convert(content: Any, kind: type[T], where: str) -> T:
    """Return what `parse_json` returned as a type. Raise BadRequestError, which names `where` and the key."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{where}: {error}") from None


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(_DEEPEST + 1):
        level = [child for value in level for child in _children(value) if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError(f"it has more than {_DEEPEST} levels of lists and objects")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
