"""`parse_json` decodes the body of a request. The routes and the text workers call it."""

from __future__ import annotations

from typing import Any

import orjson

from verl_server.errors import BadRequestError


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
