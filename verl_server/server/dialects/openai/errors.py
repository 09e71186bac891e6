"""Errors of OpenAI's routes: the object of `responses.error_content` with OpenAI's types, and the field at fault."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from verl_server.errors import VerlServerError
from verl_server.server.http import responses
from verl_server.server.http.responses import error_headers, json_response

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Sampling parameter in a message -> field of OpenAI's routes."""
_REFUSED = re.compile(r"Field `(\w+)`")
_WORD = re.compile(r"[a-z_]{1,64}")


class ModelNotFoundError(VerlServerError):
    """The request names an adapter of a model, and adapters are not served."""

    status_code = 404
    code = "model_not_found"


def openai_error(error: VerlServerError, fields: Iterable[str] = ()) -> Response:
    """Return the response to an error. `fields` are the fields of the route's body, of which a message may name one."""
    return json_response(error_content(error, fields), error.status_code, error_headers(error))


def error_content(error: VerlServerError, fields: Iterable[str] = ()) -> dict[str, Any]:
    """Return the body of an error response, or of the frame that ends a stream.

    The outer `code` is SGLang's, a number. The inner one is OpenAI's, whose type is a text or null.
    """
    message = str(error)
    kind = "BadRequestError" if error.status_code < 500 else "InternalServerError"
    param = "model" if isinstance(error, ModelNotFoundError) else error_param(message, fields)
    content = responses.error_content(error, kind, param)
    return content | {"error": content["error"] | {"code": error.code}}


def error_param(message: str, fields: Iterable[str]) -> str | None:
    """Return the first field that a message names, or None."""
    if refused := _REFUSED.match(message):
        return refused[1]
    known = set(fields)
    for word in _WORD.findall(message[:512]):
        name = _RENAMED.get(word, word)
        is_named = "_" in name or f"`{name}" in message or message.startswith((name, f"sampling_params.{name}"))
        if is_named and name in known:
            return str(name)
    return None
