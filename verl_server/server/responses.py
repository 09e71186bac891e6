"""HTTP plumbing of all routes: bounded body, strict JSON, error bodies, event streams, disconnects.

Error shapes (SGLang's): `message_error` {"error": {"message"}}, `error_object` {"object": "error", ...}, and
{"success": false, "message"} for weight routes. Every error that has one of our exceptions behind it names
its class in the `X-Verl-Error` header, from which `HttpServerEngineAdapter` raises the same class.
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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from verl_server.columns import MSGPACK
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.server.json_body import parse_json
from verl_server.server.request_state import Write
from verl_server.server.text_service import TextService
from verl_server.server.text_tools import Job

R = TypeVar("R")
T = TypeVar("T")

ERROR_HEADER = "X-Verl-Error"
_PIECE = 256 * 1024
"""Bytes of a reply that are handed to the connection at once."""
_DISCARD_SECONDS = 1.0
"""How long a body that is too large is read and thrown away, so that its sender can read our answer."""


class BodyTooLargeError(BadRequestError):
    status_code = 413


class ClientDisconnectedError(Exception):
    """Nobody is left to answer."""


def json_response(content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return encoded_response(_json(content), "application/json", status_code, headers)


def encoded_response(
    body: bytes | memoryview, media_type: str, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A long body is sent in pieces, between which the loop does what else there is to do."""
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
    """What `/generate` returns: msgpack to a client whose Accept header names it, else JSON."""
    if MSGPACK not in request.headers.get("accept", ""):
        return json_response(content)
    return encoded_response(msgspec.msgpack.encode(content), MSGPACK)


def result_writer(request: Request, stream: bool) -> Write:
    """Encodes parts of what `result_response`, or `sse` of a stream, will send."""
    if stream or MSGPACK not in request.headers.get("accept", ""):
        return write_json
    return lambda content: msgspec.Raw(msgspec.msgpack.encode(content))


def write_json(content: Any) -> orjson.Fragment:
    """A part of a JSON reply, encoded."""
    return orjson.Fragment(_json(content))


def _json(content: Any) -> bytes:
    return orjson.dumps(content, default=_base64, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _base64(value: Any) -> str:
    """JSON has no bytes: a column of a columnar result becomes base64 text."""
    if not isinstance(value, bytes):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
    return base64.b64encode(value).decode("ascii")


def error_headers(error: Exception) -> dict[str, str]:
    headers = {ERROR_HEADER: type(error).__name__} if isinstance(error, VerlServerError) else {}
    if isinstance(error, BodyTooLargeError):
        headers["Connection"] = "close"  # the rest of the body is still on its way
    return headers


def message_error(error: VerlServerError) -> Response:
    """{"error": {"message"}}, or {"error": "..."} for an unknown sampling parameter."""
    message = str(error)
    if message.startswith("sampling_params: unknown field"):
        content: dict[str, Any] = {"error": message.removeprefix("sampling_params: ")}
    else:
        content = {"error": {"message": message}}
    return json_response(content, error.status_code, error_headers(error))


def error_object(message: str, status_code: int, kind: str) -> dict[str, Any]:
    """{"object": "error", ...}; `kind` is the status code as text, "Bad Request" or an OpenAI error type."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status_code}


def status_error(error: VerlServerError) -> Response:
    content = error_object(str(error), error.status_code, str(error.status_code))
    return json_response(content, error.status_code, error_headers(error))


def bad_request(error: VerlServerError) -> Response:
    content = error_object(str(error), error.status_code, "Bad Request")
    return json_response(content, error.status_code, error_headers(error))


def openai_error(error: VerlServerError) -> Response:
    content = error_object(str(error), error.status_code, openai_error_type(error))
    return json_response(content, error.status_code, error_headers(error))


def openai_error_type(error: VerlServerError) -> str:
    return "BadRequestError" if error.status_code < 500 else "InternalServerError"


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or BodyTooLargeError without ever holding more than `limit` bytes.

    Raises ClientDisconnectedError if the client leaves before it has sent all.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        if "100-continue" not in request.headers.get("expect", "").lower():
            await _discard(request)
        raise BodyTooLargeError(f"The body has {declared} bytes; this server takes {limit} (max_request_bytes).")
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                chunks.clear()
                await _discard(request)
                raise BodyTooLargeError(f"The body has more than {limit} bytes (max_request_bytes).")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    return b"".join(chunks)


async def _discard(request: Request) -> None:
    deadline = time.monotonic() + _DISCARD_SECONDS
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while time.monotonic() < deadline:
                message = await request.receive()
                if not message.get("more_body", False):
                    return


async def read_json(request: Request, limit: int) -> Any:
    """`parse_json` of the whole body. For bodies whose sender may hold the loop: those of control routes."""
    return parse_json(await read_body(request, limit))


async def run_job(request: Request, text: TextService, job: Job[R], body: bytes) -> R:
    """The result of `job` on the body of `request`, abandoned as soon as the client closes the connection."""
    done = text.on_loop(job, body)
    return done if done is not None else await unless_disconnected(request, text.in_worker(job, body))


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelled as soon as the client closes the connection. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """`text/event-stream` of ready frames. `on_close` runs whatever happens, also if nothing was ever sent."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-cache"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def sse(content: Any) -> bytes:
    """One frame of an event stream."""
    return b"data: " + _json(content) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
