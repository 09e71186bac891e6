"""`KeepAliveTransport`: httpx's transport for hundreds of requests at once to one server.

Used by `HttpServerEngineAdapter` on each event loop. httpx's own pool looks at every connection for every
request, which at 256 requests in flight leaves 20 requests a second; here taking and giving back a connection
is one list operation. HTTP/1.1, a connection for each request in flight, idle ones kept; no retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import TypeVar, cast

import httptools
import httpx

T = TypeVar("T")
SocketOption = tuple[int, int, int]
_Origin = tuple[str, str, int]


class KeepAliveTransport(httpx.AsyncBaseTransport):
    """Belongs to the event loop that it is first used on."""

    def __init__(self, keepalive_expiry: float, socket_options: Sequence[SocketOption] = ()) -> None:
        self._expiry = keepalive_expiry
        self._socket_options = socket_options
        self._idle: dict[_Origin, list[_Connection]] = {}  # most recently used last

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        body = b"".join([chunk async for chunk in cast(httpx.AsyncByteStream, request.stream)])
        url = request.url
        origin = (url.scheme, url.host, url.port or {"http": 80, "https": 443}[url.scheme])
        connection = self._take(origin) or await self._open(origin, timeouts.get("connect"))
        try:
            connection.send(request, body)
            with _translated():
                await _within(connection.head(), timeouts.get("read"))
        except BaseException:
            connection.abort()
            raise
        stream = _Body(self, origin, connection, timeouts.get("read"))
        return httpx.Response(connection.status, headers=connection.headers, stream=stream)

    def _take(self, origin: _Origin) -> _Connection | None:
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.is_usable and time.monotonic() - connection.idle_since < self._expiry:
                return connection
            connection.abort()
        return None

    async def _open(self, origin: _Origin, timeout: float | None) -> _Connection:
        scheme, host, port = origin
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if scheme == "https" else None
        try:
            opening = loop.create_connection(_Connection, host, port, ssl=context)
            transport, connection = await _within(opening, timeout)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} within {timeout} s") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        socket = transport.get_extra_info("socket")
        for option in self._socket_options:
            socket.setsockopt(*option)
        return connection

    def give_back(self, origin: _Origin, connection: _Connection) -> None:
        """A connection whose answer was read; kept if another request may follow on it."""
        if connection.is_reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(origin, []).append(connection)
        else:
            connection.abort()

    async def aclose(self) -> None:
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.abort()


class _Connection(asyncio.Protocol):
    """One request and its answer at a time."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._lost: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.headers = []
        self._has_head = self._is_complete = self._keep_alive = False
        self._chunks: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_usable(self) -> bool:
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        return self.is_usable and self._is_complete and self._keep_alive

    def send(self, request: httpx.Request, body: bytes) -> None:
        assert self._transport is not None
        self._begin()
        lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%s: %s" % header for header in request.headers.raw]
        self._transport.write(b"\r\n".join([*lines, b"", body]))

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self._has_head:
            await self._more()

    async def chunk(self) -> bytes:
        """Some of the body; empty at its end."""
        while not self._chunks and not self._is_complete:
            await self._more()
        return self._chunks.popleft() if self._chunks else b""

    async def _more(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            self.abort()  # nothing was asked: what follows would be taken for the next answer
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = httpx.RemoteProtocolError(f"the server's answer is no HTTP: {error}")
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is None:
            message = str(exc) if exc else "the server closed the connection without answering"
            self._lost = httpx.ReadError(message) if exc else httpx.RemoteProtocolError(message)
        self._wake()

    # -- httptools' callbacks -------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


class _Body(httpx.AsyncByteStream):
    """An answer's body; closing it settles what becomes of the connection."""

    def __init__(
        self, transport: KeepAliveTransport, origin: _Origin, connection: _Connection, timeout: float | None
    ) -> None:
        self._transport = transport
        self._origin = origin
        self._connection: _Connection | None = connection
        self._timeout = timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None:
            with _translated():
                chunk = await _within(self._connection.chunk(), self._timeout)
            if not chunk:
                return
            yield chunk

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(self._origin, connection)


async def _within(work: Awaitable[T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await work


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise httpx.ReadTimeout("no answer in time") from error
