"""`parse_json`: bytes of a request to JSON-like objects. Used by the routes and by the text workers."""

from __future__ import annotations

from typing import Any

import orjson

from verl_server.errors import BadRequestError


class MalformedBodyError(BadRequestError):
    """The body is no JSON."""


def parse_json(body: bytes) -> Any:
    """The decoded body, {} if there is none. NaN, Infinity and malformed JSON are MalformedBodyError."""
    if not body or body.isspace():
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedBodyError(f"The body is not valid JSON: {error}. (NaN and Infinity are not JSON.)") from None
