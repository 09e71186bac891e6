"""`Upstream`: HTTP/1.1 connections to one server, kept open between requests.

`relay` and `members` send requests over it. The content of an answer is handed on in the pieces in which it arrives,
and is never parsed. httpx needs 0.3 ms and more for a request and aiohttp about 20 µs for each piece; a router adds
this to every token of every stream, so the connections are written against asyncio's transports and httptools.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import httptools

from verl_server.errors import ServerDiedError

Headers = list[tuple[bytes, bytes]]

_IDLE_SECONDS = 60.0
"""Seconds after which an idle connection is not used again. Servers close theirs after 600 s."""
_MOST_BUFFERED = 256 * 1024
"""Bytes of an answer that wait for their reader before the connection is no longer read."""


class UnreachableError(ServerDiedError):
    """No connection to the server could be opened, so the request was not sent."""


class Upstream:
    """The connections to one server. Use it on one event loop."""

    def __init__(self, url: str, connect_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        """`url` is http://HOST:PORT, maybe with a path, which is put before each target."""
        parts = urlsplit(url)
        self.url = url
        self._prefix = parts.path.rstrip("/").encode()
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._netloc = parts.netloc.rpartition("@")[2].encode()
        self._tls = tls if parts.scheme == "https" else None
        self._connect_seconds = connect_seconds
        self._idle: deque[Connection] = deque()
        self._used: set[Connection] = set()

    async def send(self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Exchange:
        """Send a request. Return its exchange before the answer has arrived.

        `target` is the path with the query, `headers` are without Host and Content-Length. Raise UnreachableError if no
        connection can be opened.
        """
        connection = self._take() or await self._open()
        exchange = Exchange(self, connection, answers_body=method != "HEAD")
        lines = [b"%s %s%s HTTP/1.1\r\nHost: %s" % (method.encode(), self._prefix, target, self._netloc)]
        lines += [b"%s: %s" % header for header in headers]
        if body or method not in ("GET", "HEAD", "DELETE"):
            lines.append(b"Content-Length: %d" % len(body))
        connection.begin(exchange, b"\r\n".join(lines) + b"\r\n\r\n", body)
        return exchange

    def close(self, reason: str) -> None:
        """Close all connections. Exchanges that run end with ServerDiedError and this reason."""
        for connection in [*self._used, *self._idle]:
            connection.end(ServerDiedError(reason))
        self._idle.clear()

    def _take(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < _IDLE_SECONDS:
                self._used.add(connection)
                return connection
            connection.abort()
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise UnreachableError(f"{self.url} accepted no connection within {self._connect_seconds:g} s.") from None
        except OSError as error:
            raise UnreachableError(f"{self.url} cannot be reached: {error.strerror or error}.") from None
        if not connection.is_open:
            raise UnreachableError(f"{self.url} closed the connection at once.")
        self._used.add(connection)
        return connection

    def give_back(self, connection: Connection, *, keep: bool) -> None:
        """Take a connection after its exchange. Close it unless the answer was complete and permits another one."""
        self._used.discard(connection)
        if not (keep and connection.is_at_rest):
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while self._idle and connection.idle_since - self._idle[0].idle_since >= _IDLE_SECONDS:
            self._idle.popleft().abort()


class Exchange:
    """One request and its answer. `close` must be called; before the end of the answer, it closes the connection."""

    def __init__(self, upstream: Upstream, connection: Connection, *, answers_body: bool) -> None:
        self._upstream, self._connection = upstream, connection
        self._answers_body = answers_body
        self._pieces: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._has_started = self._has_ended = self._is_closed = False
        self._keep = False
        self.status = 0
        """HTTP status. 0 before `started` has returned."""
        self.headers: Headers = []
        """Headers with their names as the server sent them."""

    @property
    def is_complete(self) -> bool:
        """True when the whole answer has arrived and has been read."""
        return self._has_ended and not self._pieces

    async def started(self) -> None:
        """Wait until status and headers have arrived. Raise ServerDiedError if the connection breaks before."""
        while not self._has_started:
            await self._news()

    async def read(self) -> bytes:
        """Return the next bytes of the content, or b"" at its end. Raise ServerDiedError if the connection breaks."""
        while not self._pieces:
            if self._has_ended:
                return b""
            await self._news()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._size > _MOST_BUFFERED:
            self._connection.resume()
        self._size = 0
        return data

    async def whole(self, most: int) -> bytes:
        """Return the whole content. Raise ServerDiedError if it has more than `most` bytes or the connection breaks."""
        found = bytearray()
        while data := await self.read():
            found += data
            if len(found) > most:
                raise ServerDiedError(f"{self._upstream.url} sent an answer of more than {most} bytes.")
        return bytes(found)

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header; `name` is in lower case."""
        return next((value for each, value in self.headers if each.lower() == name), None)

    def close(self) -> None:
        """End the exchange. A server whose answer is not complete sees that its client has left."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.exchange = None
            self._upstream.give_back(self._connection, keep=self._has_ended and self._keep)

    def abandon(self, error: Exception) -> None:
        """Let the calls that wait for the answer, and all later ones, raise `error`."""
        self._error = error
        self._pieces.clear()
        self._has_started = self._has_ended = False
        self._wake()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the connection --------------------------------------------------------------------------------

    def on_start(self, status: int, headers: Headers, *, keep: bool) -> None:
        self.status, self.headers, self._keep = status, headers, keep
        self._has_started = True
        if not self._answers_body:  # the parser would wait for the content that the headers announce
            self._has_ended, self._keep = True, False
        self._wake()

    def on_data(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _MOST_BUFFERED:
            self._connection.pause()
        self._wake()

    def on_end(self) -> None:
        self._has_ended = True
        self._wake()

    def on_lost(self, error: ServerDiedError) -> None:
        if not self._has_ended:
            self._error = error
        self._wake()


class Connection(asyncio.Protocol):
    """One connection. `Upstream` owns it, an `Exchange` has it for one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: Headers = []
        self._is_paused = False
        self._ends_with_connection = False
        self.exchange: Exchange | None = None
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_at_rest(self) -> bool:
        """True if the connection is open and the whole request was sent. A server may answer before."""
        return self.is_open and self._transport is not None and not self._transport.get_write_buffer_size()

    def begin(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Send a request whose answer belongs to `exchange`."""
        self.exchange = exchange
        self.resume()  # the answer before may have been left unread
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        if len(body) < 64 * 1024:
            self._transport.write(head + body)  # two writes would wake the server twice
        else:
            self._transport.writelines([head, body])

    def pause(self) -> None:
        if self._transport is not None and not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused and self.is_open:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection now, also if the server reads nothing of what is still to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def end(self, error: ServerDiedError) -> None:
        """Close the connection at once. A running exchange ends with `error`."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_lost(error)
        self.abort()

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self.exchange is None or self._parser is None:
            self.abort()  # nobody asked for it
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.end(ServerDiedError(f"The server sent no HTTP answer: {error}."))

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._ends_with_connection and exc is None:
            exchange.on_end()
        else:
            exchange.on_lost(ServerDiedError(f"The connection to the server broke: {exc or 'it was closed'}."))

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self.exchange is None or (status := self._parser.get_status_code()) < 200:
            return
        names = {name.lower() for name, _ in self._headers}
        is_framed = bool(names & {b"content-length", b"transfer-encoding"}) or status in (204, 304)
        self._ends_with_connection = not is_framed
        self.exchange.on_start(status, self._headers, keep=is_framed and self._parser.should_keep_alive())

    def on_body(self, data: bytes) -> None:
        if self.exchange is not None:
            self.exchange.on_data(data)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self.exchange is not None and self._parser.get_status_code() >= 200:
            self.exchange.on_end()
