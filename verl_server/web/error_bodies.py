"""The bodies of error answers in the shapes of the dialects, and the events that end a stream with an error.

The dialects of the rollout server use them, and the router, which answers in the dialect of the path, too.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from verl_server.errors import VerlServerError

ERROR_HEADER = "X-Verl-Error"
"""Header of an error answer: name of the error's class."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> Anthropic's error type, for statuses that have one of their own."""


def sglang_error_body(error: VerlServerError, kind: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error in SGLang's shapes. `kind` is the error's type, `param` the field at fault."""
    status, message = error.status_code, str(error)
    kind = kind or ("Bad Request" if status == 400 else str(status))
    inner = {"message": message, "type": kind, "param": param, "code": error.code or status}
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status, "error": inner}


def sglang_error_event(error: VerlServerError, *, retryable: bool = False) -> dict[str, Any]:
    """Return the data of the event that ends a stream of `/generate`."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = error.code or error.status_code
    return {"error": {"message": str(error), "type": kind, "code": code, "retryable": retryable}}


def openai_error_body(error: VerlServerError, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error on OpenAI's routes.

    The outer `code` is SGLang's, a number. The inner one is OpenAI's, whose type is a text or null.
    """
    kind = "BadRequestError" if error.status_code < 500 else "InternalServerError"
    content = sglang_error_body(error, kind, param)
    return content | {"error": content["error"] | {"code": error.code}}


def openai_error_event(content: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the event that ends a stream, where the openai SDK reads it. `content` is the error's body."""
    return {"error": content | {"code": content["error"]["code"]}}


def anthropic_error_body(error: VerlServerError) -> dict[str, Any]:
    """Return the body of an error on Anthropic's routes, which is also the data of the event that ends a stream."""
    kind = "invalid_request_error" if error.status_code < 500 else "api_error"
    content: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(error.status_code, kind), "message": str(error)}
    if error.code is not None:
        content["code"] = error.code
    return {"type": "error", "error": content}


def vllm_error_body(error: VerlServerError) -> dict[str, Any]:
    """Return the body of an error on vLLM's routes. `code` is the status or a name."""
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    try:
        phrase = HTTPStatus(error.status_code).phrase
    except ValueError:
        phrase = "Internal Server Error"
    kind = kinds.get(error.status_code, phrase)
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code or error.status_code}}
