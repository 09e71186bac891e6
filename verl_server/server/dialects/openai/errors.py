"""Errors of OpenAI's routes: OpenAI's body of an error (`web.error_bodies`) with the field at fault."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from verl_server.errors import VerlServerError
from verl_server.server.http.responses import error_headers, json_response
from verl_server.web.error_bodies import openai_error_body

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
    """Return the body of an error response, or of the frame that ends a stream."""
    return openai_error_body(
        error, "model" if isinstance(error, ModelNotFoundError) else error_param(str(error), fields)
    )


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
