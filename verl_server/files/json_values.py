"""Values of users as JSON: writes the values that environments, tools and callers return, even of types that JSON
lacks.

`jsonable` is the hook for values that an encoder does not know; `dumps` encodes with it.
"""

from __future__ import annotations

import json
from collections import UserString, deque
from collections.abc import Iterable, Mapping, Sequence, Set, ValuesView
from datetime import timedelta
from os import PathLike, fspath
from typing import Any

import msgspec
import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def dumps(value: Any) -> bytes:
    """Return a value as JSON. Raise TypeError, which names the type, for a value that JSON cannot represent.

    Integers beyond 64 bits are written as they are.
    """
    try:
        return orjson.dumps(value, default=jsonable, option=_OPTIONS)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise
        return json.dumps(value, default=jsonable, ensure_ascii=False, separators=(",", ":")).encode()


def jsonable(value: Any) -> Any:
    """Convert a value of a type that JSON lacks into a value of a JSON type. Raise TypeError if this is not possible.

    Arrays and scalars of torch and numpy become lists and numbers. Ranges, sets (sorted where they can be), tuples and
    other sequences become lists, mappings and pydantic's models become objects, paths and UTF-8 bytes
    become texts.
    """
    if callable(tolist := getattr(value, "tolist", None)):  # torch and numpy, also what orjson does not read of them
        return tolist()
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json")
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value, enc_hook=jsonable)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return _sorted(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode()  # a UnicodeDecodeError is a ValueError, which encoders pass on
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, UserString | timedelta):
        return str(value)
    if isinstance(value, Sequence | Set | ValuesView | deque):
        return list(value)
    if type(value).__module__ == "decimal" or type(value).__name__ == "Fraction":
        return float(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is no type of JSON")


def _sorted(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return list(values)
