"""Error answers in vLLM's shape: {"error": {"message", "type", "param", "code"}}. `code` is the status or a name."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from verl_server.errors import VerlServerError
from verl_server.server.http.responses import error_headers, json_response


class ModelNotFoundError(VerlServerError):
    """The server does not serve a model of this name."""

    status_code = 404


def error_content(error: VerlServerError) -> dict[str, Any]:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    try:
        phrase = HTTPStatus(error.status_code).phrase
    except ValueError:
        phrase = "Internal Server Error"
    kind = kinds.get(error.status_code, phrase)
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code or error.status_code}}


def vllm_error(error: VerlServerError) -> Response:
    """Return the response to an error."""
    return json_response(error_content(error), error.status_code, error_headers(error))
