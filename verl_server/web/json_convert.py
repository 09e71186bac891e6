"""`convert_json`: a decoded JSON body -> a struct. Every route and dialect converts its bodies here.

It accepts the same lossless conversions as pydantic's lax mode in vLLM and SGLang:

| given | for | is |
|---|---|---|
| null | any field | the default, also in objects inside the body |
| 4.0 | an integer | 4 |
| "4", "0.5" | a number | 4, 0.5 |
| 0, 1, "true", "false" | true or false | that value |

Everything else is refused: 4.5 for an integer, true for a number (which number would it be?), a number for a text.
Values that have no declared type (messages, schemas, variables of templates) stay as they are.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from verl_server.errors import BadRequestError

T = TypeVar("T")
_LEAST, _MOST = -(2**63), 2**64 - 1


def convert_json(value: Any, kind: type[T]) -> T:
    """Return `value` as a `kind`. Raise `msgspec.ValidationError`, which names the place."""
    given = _without_nulls(value, kind)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        read = msgspec.convert(given, kind, strict=False)
    _check_texts("$", given, read)
    return read


def read_struct(value: Any, kind: type[T], place: str = "") -> T:
    """Return `convert_json(value, kind)`. Raise BadRequestError: `place`, what is wrong, and in which field."""
    try:
        return convert_json(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(place + str(error).replace("`$.", "`")) from None


def _check_texts(place: str, given: Any, read: Any) -> None:
    """Raise `msgspec.ValidationError` for texts that msgspec converts, and that are no number of JSON.

    Names that a struct does not have are left to `unknown_fields`.
    """
    if isinstance(read, msgspec.Struct) and isinstance(given, dict):
        for field in msgspec.structs.fields(read):
            if field.encode_name in given:
                _check_texts(f"{place}.{field.encode_name}", given[field.encode_name], getattr(read, field.name))
    elif isinstance(read, list | tuple) and isinstance(given, list):
        for part, each in zip(given, read, strict=True):
            _check_texts(place, part, each)
    elif isinstance(read, dict) and isinstance(given, dict):
        if len(given) != len(read):  # "5" and "05" for an integer
            raise msgspec.ValidationError(f"Expected names that differ - at `{place}`")
        for (name, part), each in zip(given.items(), read.values(), strict=True):
            _check_texts(f"{place}.{name}", part, each)
    elif isinstance(given, str) and (
        read is None
        or (type(read) is int and not _LEAST <= read <= _MOST)
        or (isinstance(read, float) and not math.isfinite(read))
    ):
        raise msgspec.ValidationError(f"Expected a number of 64 bits, got `{given:.64}` - at `{place}`")


def _without_nulls(value: Any, kind: Any) -> Any:
    """Return a value without the nulls of objects that become structs."""
    if isinstance(value, list):
        return [_without_nulls(each, kind) for each in value]
    if not isinstance(value, dict):
        return value
    inner = _fields_with_structs(kind)
    given = {name: each for name, each in value.items() if each is not None}
    return given | {name: _without_nulls(given[name], inner[name]) for name in inner.keys() & given.keys()}


@cache
def _fields_with_structs(kind: Any) -> dict[str, Any]:
    """Name of each field of a struct that holds a struct, or a list of structs -> this inner struct."""
    fields = ((field.encode_name, _struct_in(field.type)) for field in msgspec.structs.fields(kind))
    return {name: inner for name, inner in fields if inner is not None}


def _struct_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for each in get_args(annotation) if (found := _struct_in(each)) is not None), None)
