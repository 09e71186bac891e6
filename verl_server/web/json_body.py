"""`parse_json` decodes the body of a request, `given_fields` checks that it is an object, and `names_of_unknown` lists
its unknown fields. Routes and text workers call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from verl_server.errors import BadRequestError

MOST_NAMES = 32
"""Most unknown fields of one request that are named."""
LONGEST_NAME = 64
"""Characters of such a name that are shown."""


class MalformedBodyError(BadRequestError):
    """The body is not JSON."""


def parse_json(body: bytes) -> Any:
    """Return the decoded body, or {} for an empty body. Raise MalformedBodyError for malformed JSON, NaN, Infinity."""
    if not body or body.isspace():
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedBodyError(f"The body is not valid JSON: {error}. (NaN and Infinity are not JSON.)") from None


def given_fields(body: Any) -> dict[str, Any]:
    """Return the fields of a body, without those that are null. Raise BadRequestError for a body that is no object."""
    if not isinstance(body, dict):
        raise BadRequestError(f"The request body must be a JSON object, not {type(body).__name__}.")
    return {name: value for name, value in body.items() if value is not None}


def names_of_unknown(body: Mapping[str, Any], read: msgspec.Struct) -> list[str]:
    """Return the keys of `body` that the decoded struct `read` does not have, at most `MOST_NAMES`.

    Some of these names may be fields that the operation refuses or ignores on purpose: `unknown_fields` decides.

    A key inside an object that was decoded as a struct too is named with its path (`stream_options.include_usage`).
    Objects in lists, such as messages and tools, are not checked, because new versions of
    their formats have further fields.
    """
    names: list[str] = []
    fields = dict(zip(read.__struct_encode_fields__, read.__struct_fields__, strict=True))
    if read.__struct_config__.tag is not None:  # a message between processes, whose id is internal
        fields.pop("id", None)
    for key, value in body.items():
        if len(names) >= MOST_NAMES:
            break
        if key in fields:
            inner = getattr(read, fields[key])
            if isinstance(value, dict) and isinstance(inner, msgspec.Struct):
                names += [f"{key}.{name}" for name in names_of_unknown(value, inner)]
        elif value is not None:  # null asks for nothing
            names.append(key[: LONGEST_NAME + 1])
    return names[:MOST_NAMES]
