"""HTTP functions of all routes: bounded bodies, strict JSON, error bodies, event streams, disconnects.

Every error of a route has the shape of the route's dialect, also if the request does not reach the handler. The routes
of OpenAI, Anthropic and vLLM have the shapes of these projects. All others have SGLang's shapes in one object:
{"object": "error", "message", "type", "param", "code", "error": {"message", "type", "param", "code"}}, and routes that
change weights have "success": false, too. `code` is the HTTP status; in `error`, it is the name of the error if it has
one. The header `X-Verl-Error` names the exception class of the error, and `HttpServerEngineAdapter` raises the same
class.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from verl_server.errors import (
    BadRequestError,
    ForbiddenError,
    SessionError,
    SessionUnavailableError,
    UnauthorizedError,
    VerlServerError,
    VersionBehindError,
    WeightVersionError,
)
from verl_server.messages.columns import MSGPACK
from verl_server.server.request_state import Write
from verl_server.server.text.text_tools import Job
from verl_server.server.text_service import TextService
from verl_server.web.bodies import Body
from verl_server.web.error_bodies import ERROR_HEADER, sglang_error_body
from verl_server.web.first_headers import first_headers
from verl_server.web.json_body import parse_json
from verl_server.web.numbers import whole_number

R = TypeVar("R")
T = TypeVar("T")

_PIECE = 256 * 1024
"""Bytes of a long body that are sent at once."""
_SMALL_BODY = 2**21
"""The most bytes of a body that is parsed on the event loop, unless it lists tensors.

The loop needs some 10 ms for it.
"""
_DISCARD_SECONDS = 1.0
"""Longest time to read and discard a body that is too large, so that the client can read the response."""


class BodyTooLargeError(BadRequestError):
    """The body has more bytes than its route takes: `max_request_bytes`, or fewer for a route that needs few."""

    status_code = 413


class NotServedError(VerlServerError):
    """No operation serves the request. The answer has no X-Verl-Error: any other server would answer the same."""

    def __init__(self, status_code: int, message: str, allowed: tuple[str, ...] = ()) -> None:
        """Take the methods that the path has as `allowed`."""
        super().__init__(message)
        self.status_code = status_code
        self.allowed = allowed


class ClientDisconnectedError(Exception):
    """The client closed the connection before the response."""


def json_response(content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return encoded_response(_json(content), "application/json", status_code, headers)


def encoded_response(
    body: bytes | memoryview, media_type: str, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with an encoded body. A long body is sent in pieces, so that the loop can do other work."""
    if len(body) <= _PIECE:
        return Response(bytes(body), status_code, headers, media_type)
    length = {"Content-Length": str(len(body))}
    return StreamingResponse(_pieces(body), status_code, (headers or {}) | length, media_type)


async def _pieces(body: bytes | memoryview) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(view), _PIECE):
        yield bytes(view[start : start + _PIECE])
        await asyncio.sleep(0)


def result_response(request: Request, content: Any) -> Response:
    """Return the response of `/generate`: msgpack if the client's Accept header names it, otherwise JSON."""
    if MSGPACK not in request.headers.get("accept", ""):
        return json_response(content)
    return encoded_response(msgspec.msgpack.encode(content), MSGPACK)


def result_writer(request: Request, stream: bool) -> Write:
    """Return the function that encodes parts of a result for `result_response` or, with `stream`, for `sse`."""
    if stream or MSGPACK not in request.headers.get("accept", ""):
        return write_json
    return lambda content: msgspec.Raw(msgspec.msgpack.encode(content))


def write_json(content: Any) -> orjson.Fragment:
    """Encode a part of a JSON reply."""
    return orjson.Fragment(_json(content))


def _json(content: Any) -> bytes:
    return orjson.dumps(content, default=_base64, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _base64(value: Any) -> str:
    """Encode the bytes of a column as base64 text, because JSON has no bytes."""
    if not isinstance(value, bytes):
        raise TypeError(f"A {type(value).__name__} cannot be encoded as JSON.")
    return base64.b64encode(value).decode("ascii")


def error_headers(error: VerlServerError) -> dict[str, str]:
    if isinstance(error, NotServedError):
        return {"Allow": ", ".join(error.allowed)} if error.allowed else {}
    headers = {ERROR_HEADER: type(error).__name__}
    if isinstance(error, SessionError | ForbiddenError | WeightVersionError):
        # The SDKs of OpenAI and Anthropic retry every 409 otherwise.
        headers["x-should-retry"] = "true" if isinstance(error, VersionBehindError) else "false"
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, SessionUnavailableError | VersionBehindError):
        headers["Retry-After"] = "1"
    if isinstance(error, BodyTooLargeError):
        headers["Connection"] = "close"  # the client may still be sending the rest of the body
    return headers


def error_response(error: VerlServerError) -> Response:
    """Return the answer to an error of an operation whose dialect has no shape of its own."""
    return json_response(sglang_error_body(error), error.status_code, error_headers(error))


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body. Raise BodyTooLargeError if it has more than `limit` bytes, without holding more in memory.

    Raise ClientDisconnectedError if the client disconnects before the end of the body.
    """
    declared = first_headers(request.scope).get(b"content-length", b"").decode("latin-1")
    if (whole_number(declared, most_digits=20) or 0) > limit:
        if "100-continue" not in request.headers.get("expect", "").lower():
            await _discard(request)
        raise BodyTooLargeError(f"The body has {declared} bytes; this route takes at most {limit}{_remedy(limit)}.")
    body = Body()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        body.add(chunk)
        if body.size > limit:
            body = Body()
            if more:
                await _discard(request)
            raise BodyTooLargeError(
                f"The body has more than {limit} bytes, the most that this route takes{_remedy(limit)}."
            )
    return body.whole()


def _remedy(limit: int) -> str:
    return "" if limit == _SMALL_BODY else " (see max_request_bytes)"


async def _discard(request: Request) -> None:
    deadline = time.monotonic() + _DISCARD_SECONDS
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while time.monotonic() < deadline:
                message = await request.receive()
                if not message.get("more_body", False):
                    return


async def read_json(request: Request, limit: int, *, carries_tensors: bool = False) -> Any:
    """Return the parsed body. The event loop parses it, so the body must be small. `limit` is `max_request_bytes`.

    With `carries_tensors`, the body may list each tensor of a model, with handles of all ranks, and may have as many
    bytes as a prompt. Only callers that may change weights send such a body.
    """
    return parse_json(await read_body(request, limit if carries_tensors else min(limit, _SMALL_BODY)))


async def run_job(request: Request, text: TextService, job: Job[R], body: bytes) -> R:
    """Return the result of `job` on `body`. Raise ClientDisconnectedError when the client disconnects before that."""
    done = text.on_loop(job, body)
    return done if done is not None else await unless_disconnected(request, text.in_worker(job, body))


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. Cancel it and raise ClientDisconnectedError when the client disconnects.

    The body must have been read before.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work  # in this task: a task of its own would take two more turns of the loop
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:  # else somebody cancelled this task, too
            raise ClientDisconnectedError from None
        raise
    finally:
        watcher.cancel()


class EventStream(StreamingResponse):
    """A `text/event-stream` response of encoded frames. `on_close` is called at the end, even if nothing was sent."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-cache"})
        self._on_close = on_close
        self.is_complete = False
        """True after the last frame was passed to the connection.

        If the client disconnects, the stream ends earlier.
        """

    async def stream_response(self, send: Send) -> None:
        await super().stream_response(send)
        self.is_complete = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def sse(content: Any) -> bytes:
    """Return one encoded frame of an event stream."""
    return b"data: " + _json(content) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
