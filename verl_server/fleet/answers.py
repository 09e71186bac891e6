"""Errors of the router itself, in the shape of the dialect of the request's path: as answers, and as last events."""

from __future__ import annotations

from typing import Any

import orjson

from verl_server.errors import (
    BadRequestError,
    ForbiddenError,
    ServerDiedError,
    SessionError,
    SessionUnavailableError,
    UnauthorizedError,
    VerlServerError,
)
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.upstream import Headers
from verl_server.web.error_bodies import (
    ERROR_HEADER,
    anthropic_error_body,
    openai_error_body,
    openai_error_event,
    sglang_error_body,
    sglang_error_event,
    vllm_error_body,
)

RETRY_SECONDS = 1
"""Value of Retry-After, in seconds."""
_DONE = b"data: [DONE]\n\n"


class NoServerError(ServerDiedError):
    """No server may get the request now. Nothing was done: repeat it."""


class NotThroughRouterError(BadRequestError):
    """The route is one of single servers."""

    status_code = 409


def error_answer(dialect: str, error: VerlServerError, *, says_success: bool = False) -> tuple[int, Headers, bytes]:
    """Return (status, headers, body). `says_success` is of the operation (`RoutedOperation`)."""
    match dialect:
        case "openai" | "models":
            body: dict[str, Any] = openai_error_body(error)
        case "anthropic":
            body = anthropic_error_body(error)
        case "vllm":
            body = vllm_error_body(error)
        case _:
            body = sglang_error_body(error) | ({"success": False} if says_success else {})
    encoded = orjson.dumps(body)
    # Engines raise the class that the header names: of the router's own classes they know the base.
    name = (
        type(error).__name__
        if type(error).__module__ == VerlServerError.__module__
        else type(error).__bases__[0].__name__
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(encoded)).encode()),
        (ERROR_HEADER.lower().encode(), name.encode()),
    ]
    if error.status_code == 503:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    if isinstance(error, ForbiddenError | SessionError | NotThroughRouterError):
        headers.append((b"x-should-retry", b"false"))  # the SDKs of OpenAI and Anthropic retry every 409 otherwise
    if isinstance(error, UnauthorizedError):
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status_code == 413:
        headers.append((b"connection", b"close"))
    return error.status_code, headers, encoded


def error_event(operation: RoutedOperation, error: VerlServerError) -> bytes:
    """Return the events that end a stream of which a part was delivered."""
    match operation.dialect:
        case "openai" if operation.name == "/v1/responses":
            # A typed event, as all of this stream are. OpenAI's SDK raises what is in `error`.
            body = openai_error_body(error)
            typed = {"type": "error", "code": "server_error", "message": str(error), "param": None}
            return b"event: error\n" + _sse(typed | openai_error_event(body))
        case "openai":
            return _sse(openai_error_event(openai_error_body(error))) + _DONE
        case "anthropic":
            return b"event: error\n" + _sse(anthropic_error_body(error))
        case "vllm":
            return _sse(vllm_error_body(error)) + _DONE
        case _:
            return _sse(sglang_error_event(error, retryable=True)) + _DONE


def _sse(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def unavailable(session: bool, message: str) -> VerlServerError:
    """Return the error of a request that no server may get, or that the server of its session may not get."""
    return SessionUnavailableError(message) if session else NoServerError(message)
