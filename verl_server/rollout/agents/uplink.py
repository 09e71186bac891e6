"""`uplink`: the outer end of an isolated program's connections, on the runner's event loop.

`program.py` opens one uplink for each address of an episode: its session on the rollout server, and its environment's
gateway. The uplink serves a Unix socket that only this episode's sandbox sees, and each connection to it becomes one
connection to the address.

The uplink reads the requests, because a server answers some routes without a key (`/health`, `/metrics`; a server for
callers without a key even generates), and a proxy in front of it may serve other hosts. It hands on what is at or below
the path of its URL, writes the `Host` of the URL, and answers anything else with 404. It writes each request anew, so
that the server sees the same border between two requests as the uplink. Answers pass unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import orjson

from verl_server.engine.http_clients import CONNECT_TIMEOUT, KEEP_ALIVE_OPTIONS, certificates

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_CHUNK = 64 * 1024
_MOST_HEAD_BYTES = 64 * 1024
"""Most bytes of a request line with its headers, as the server's own bound."""
_HOP = (b"host", b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"content-length", b"transfer-encoding")
"""Headers of one connection, which the uplink writes itself."""


@contextlib.asynccontextmanager
async def uplink(path: Path, url: str) -> AsyncIterator[None]:
    """Serve the Unix socket `path` until the block ends, for requests at or below `url` (http or https).

    The socket's folder must be private to this user. If the server is away, clients see a closed connection.
    """
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _carry(reader, writer, url)
        except asyncio.CancelledError:
            pass  # the episode has ended
        finally:
            connections.discard(task)
            writer.transport.abort()

    with _bound(path) as listening:
        server = await asyncio.start_unix_server(serve, sock=listening)
        try:
            yield
        finally:
            server.close()
            for task in list(connections):
                task.cancel()
            if connections:
                await asyncio.wait(list(connections), timeout=5.0)
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _bound(path: Path):  # type: ignore[no-untyped-def]
    """Yield a listening Unix socket. Its address may be longer than the 107 bytes that a socket address holds."""
    import os

    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        yield listening
    finally:
        os.close(folder)
        listening.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str) -> None:
    """Carry one connection to its end."""
    address = urlsplit(url)
    is_tls = address.scheme == "https"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            from_server, to_server = await asyncio.open_connection(
                address.hostname,
                address.port or (443 if is_tls else 80),
                ssl=certificates() if is_tls else None,
                limit=_CHUNK,
            )
    except (OSError, TimeoutError) as error:
        logger.debug("An agent's connection to %s failed: %s", address.netloc, error)
        return
    try:
        sock = to_server.get_extra_info("socket")
        for option in KEEP_ALIVE_OPTIONS:
            sock.setsockopt(*option)
        there = asyncio.ensure_future(_requests(reader, to_server, _Requests(address.path.rstrip("/"), address.netloc)))
        back = asyncio.ensure_future(_copy(from_server, writer))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            if there.done() and not back.done():
                refusal = there.exception()
                if isinstance(refusal, _Refusal):
                    back.cancel()
                    await asyncio.wait([back])
                    writer.write(refusal.answer)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
                elif refusal is None:
                    await back  # the client sends no more, and still reads
        except OSError:
            pass  # one side has gone
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
    finally:
        to_server.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: _Requests) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(requests.feed(data))
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


class _Refusal(Exception):
    """A request that is not handed on."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        body = orjson.dumps({"error": {"message": message, "type": "invalid_request_error"}})
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.answer = f"{head}connection: close\r\n\r\n".encode() + body


class _Requests:
    """Reads the requests of one connection and writes them anew. The parser calls the methods `on_...`."""

    def __init__(self, path: str, host: str) -> None:
        self._path, self._host = path, host
        self._parser = httptools.HttpRequestParser(self)
        self._out = bytearray()
        self._head_bytes = 0
        self._refusal: _Refusal | None = None
        self.on_message_begin()

    def feed(self, data: bytes) -> bytes:
        """Return what the server gets for these bytes of the client. Raise _Refusal."""
        self._out.clear()
        self._head_bytes += len(data) if self._in_head else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refusal = _Refusal("400 Bad Request", "This address speaks HTTP/1.1 only: no upgrade, no CONNECT.")
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or _Refusal("400 Bad Request", f"This is no request of HTTP/1.1: {error}")
        if self._in_head and self._head_bytes > _MOST_HEAD_BYTES:
            self._refusal = _Refusal("431 Request Header Fields Too Large", "The headers are too long.")
        if self._refusal is not None:
            raise self._refusal
        return bytes(self._out)

    # -- the parser's events ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        path = self._target.partition(b"?")[0]
        allowed = self._path.encode()
        if (path != allowed and not path.startswith(allowed + b"/")) or b"/.." in path or b"%2e" in path.lower():
            shown = self._target[:200].decode("latin-1")
            self._refusal = _Refusal("404 Not Found", f"This program reaches its own session only, not {shown!r}.")
            raise self._refusal
        sent = {name.lower(): value for name, value in self._headers}
        self._is_chunked = b"transfer-encoding" in sent
        self._out += b"%s %s HTTP/%s\r\n" % (
            self._parser.get_method(),
            self._target,
            self._parser.get_http_version().encode(),
        )
        self._out += b"host: %s\r\n" % self._host.encode()
        for name, value in self._headers:
            if name.lower() not in _HOP:
                self._out += b"%s: %s\r\n" % (name, value)
        if not self._parser.should_keep_alive():
            self._out += b"connection: close\r\n"
        if self._is_chunked:
            self._out += b"transfer-encoding: chunked\r\n"
        elif b"content-length" in sent:
            self._out += b"content-length: %s\r\n" % sent[b"content-length"]
        self._out += b"\r\n"

    def on_body(self, body: bytes) -> None:
        self._out += b"%x\r\n%s\r\n" % (len(body), body) if self._is_chunked else body

    def on_message_complete(self) -> None:
        if self._is_chunked:
            self._out += b"0\r\n\r\n"
