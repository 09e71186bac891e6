"""`TokenTexts`: the text of each token of a run, without transformers.

`find_tokenizer` names the file as `verl-server trajectories show` finds it, on this machine only. A token has the same
text in every window: bytes that are no UTF-8 alone, because a character lies in several tokens, are written as <0xE2>.
`span_text` decodes tokens together, for the texts of a conversation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from verl_server.errors import BadRequestError
from verl_server.watch.site.texts import head, visible

_LONGEST = 200
"""Most characters of one token's text."""
_FILE = "tokenizer.json"


class TokenTexts:
    """The texts of one tokenizer. Any thread may call it."""

    def __init__(self, file: Path) -> None:
        """Raise BadRequestError if the file cannot be loaded."""
        self.file = file
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
            model = msgspec.json.decode(file.read_bytes())
        except Exception as error:  # tokenizers raises plain Exceptions
            raise BadRequestError(f"{file} cannot be loaded as a tokenizer: {str(error)[:300]}.") from None
        self._kinds = set(_decoder_kinds(model.get("decoder") if isinstance(model, dict) else None))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self._added = {number: token.content for number, token in added.items()}
        self._text = functools.lru_cache(maxsize=32768)(self._text_of)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, which does not depend on its neighbours."""
        return [self._text(token) for token in tokens]

    def span_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens together, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _text_of(self, number: int) -> str:
        if number in self._added:
            return head(self._added[number], _LONGEST)
        token = self._tokenizer.id_to_token(number)
        if token is None:
            return f"<{number}>"  # an id beyond the vocabulary: models have more rows than the tokenizer has tokens
        if "ByteLevel" in self._kinds:
            return head(_from_bytes(token), _LONGEST)
        if self._kinds & {"Metaspace", "ByteFallback", "Replace"}:
            return head(token.replace("\u2581", " "), _LONGEST)
        if "WordPiece" in self._kinds:
            return head(token[2:] if token.startswith("##") else f" {token}", _LONGEST)
        return head(self._tokenizer.decode([number], skip_special_tokens=False), _LONGEST)


def find_tokenizer(option: str | None, settings: dict[str, Any], folder: Path) -> tuple[Path | None, str]:
    """Return the tokenizer.json of a run, and "" or the reason why there is none.

    `option` is --tokenizer. `settings` are those of the run, `folder` is where it lies.
    """
    given = [("--tokenizer", option)] if option is not None else _named(settings)
    if option is None:
        given.append(("the run's folder", str(folder / "model")))
    tried = []
    for source, name in given:
        for place in _places(name or "", folder):
            if (file := place / _FILE).is_file():
                return file, ""
        tried.append(f"{visible(str(name))[:200]} ({source})")
    return None, f"No {_FILE} on this machine: {', '.join(tried)}. Name a folder that has one with --tokenizer."


def _named(settings: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return the folders that the settings of a run name, in the order in which a server takes them."""
    found: list[tuple[str, str | None]] = []
    for name in ("tokenizer_path", "model_path", "model"):
        value = settings.get(name)
        if isinstance(value, str) and value:
            found.append((f"{name} of the run", value))
    return found


def _places(name: str, folder: Path) -> list[Path]:
    """Return the local folders that a path or hub id may name: the path, or snapshots in the hub's local cache."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return [path]
        if path.is_file():
            return [path.parent] if path.name == _FILE else []
    except (OSError, RuntimeError, ValueError):
        return []
    parts = name.split("/")
    if path.is_absolute() or len(parts) > 2 or not all(part and part[0].isalnum() for part in parts):
        return []
    snapshots = _hub_cache() / f"models--{'--'.join(parts)}" / "snapshots"
    return sorted(snapshots.glob("*"), key=lambda each: each.stat().st_mtime, reverse=True)


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _decoder_kinds(decoder: Any) -> list[str]:
    """Return the types of a decoder and of its parts."""
    if not isinstance(decoder, dict):
        return []
    inner = [kind for part in decoder.get("decoders") or [] for kind in _decoder_kinds(part)]
    return [str(decoder.get("type")), *inner]


def _from_bytes(token: str) -> str:
    """Return the text of a token of a byte-level vocabulary, in which a character stands for each byte."""
    table = _byte_of_character()
    data = bytes(table[character] for character in token if character in table)
    text, rest = "", data
    while rest:
        try:
            return text + rest.decode("utf-8")
        except UnicodeDecodeError as error:
            whole = rest[: error.start].decode("utf-8")
            bad = rest[error.start : error.end]
            text += whole + "".join(f"<0x{byte:02X}>" for byte in bad)
            rest = rest[error.end :]
    return text


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies.

    Bytes that are printable in latin-1 stand for themselves; the others, in their order, for characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
