"""`uplink`: the outer end of an isolated program's connections, a small HTTP proxy on the runner's event loop.

`program.py` opens an uplink for each address of an episode: its session on the rollout server, and its environment's
gateway. The uplink serves a Unix socket that only this episode's sandbox sees. It hands on the requests of a list only,
because a server answers other routes without a key (`/metrics`, and some servers even generate), and a proxy in front
of the server may serve other hosts. The path of the URL, which has the session key, is added here: a program does not
know the key, so it is in no prompt. `Traffic` says what became of the requests, because a program may exit with 0
although its server was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from verl_server.engine.http_clients import CONNECT_TIMEOUT, aiohttp_session

logger = logging.getLogger(__name__)

GENERATIONS = frozenset([("POST", f"/v1/{name}") for name in ("messages", "chat/completions", "responses")])
"""Requests that sample in a session."""
SESSION_REQUESTS = GENERATIONS | {("POST", "/v1/messages/count_tokens"), ("GET", "/v1/models")}
"""Requests that a program may send to its session."""
ENVIRONMENT_REQUESTS = frozenset(
    [("GET", "/observation"), ("POST", "/step"), ("GET", "/tools"), ("POST", "/call")]  # as in `gateway`
)
"""Requests that a program may send to its environment."""

MOST_CONNECTIONS = 64
"""Most connections of one uplink. The descriptors of the runner are those of all its episodes."""
_BACKLOG = 128
_MOST_ERROR_CHARACTERS = 2000
_RETRY_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 3600.0
_OF_CONNECTIONS = ("host", "connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade", "expect")
_OF_CALLERS = ("authorization", "x-api-key", "idempotency-key", "origin", "referer", "cookie", "forwarded")
_DROPPED = frozenset([*_OF_CONNECTIONS, "transfer-encoding", *_OF_CALLERS])
"""Headers that concern one connection, that name a caller, or that choose an earlier answer."""
_DROPPED_PREFIXES = ("x-session-", "x-verl-", "sec-fetch-", "x-forwarded-")
_NOT_RETURNED = frozenset(["connection", "keep-alive", "transfer-encoding"])


@dataclass
class Traffic:
    """What one episode's program has asked its session, as the runner saw it."""

    requests: int = 0
    """Requests that were handed on."""
    refused: int = 0
    """Requests that are not allowed, and connections above the bound."""
    failed_connects: int = 0
    """Connections to the server that failed. They are tried again."""
    generations: int = 0
    """Generations that were asked for."""
    last_status: int | None = None
    """Status of the generation that ended last. 0: its connection was lost, or the server stayed away. None: none.
    A generation that the program left before its answer began does not count."""
    last_error: str = ""
    """Text of that answer if its status is an error."""
    on_request: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Called at each request, before it is handed on."""

    def _ended(self, status: int, error: str) -> None:
        self.last_status, self.last_error = status, error
        if status == 0 or status >= 500:
            _warn_of_server(status, error[:500])


@functools.lru_cache(maxsize=64)
def _warn_of_server(status: int, error: str) -> None:
    """Log each kind of failure once: many programs may ask again and again for minutes."""
    logger.warning("The server does not generate for programs now (status %d): %s", status, error)


@contextlib.asynccontextmanager
async def uplink(
    path: Path, url: str, allowed: Collection[tuple[str, str]], restart_timeout: float
) -> AsyncIterator[Traffic]:
    """Serve the Unix socket `path` until the block ends, and hand on the `allowed` (method, path) to below `url`.

    A connection to a server that is away is tried again for `restart_timeout` seconds. What was sent is never sent
    again. The folder of the socket must be private to this user.
    """
    traffic = Traffic()
    loop = asyncio.get_running_loop()
    async with aiohttp_session(0, force_close=True, auto_decompress=False) as client:
        proxy = _Proxy(client, url.rstrip("/"), allowed, restart_timeout, traffic)
        http = web.Server(
            proxy.answer,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            auto_decompress=False,  # bodies pass as they are
        )

        def accepted() -> asyncio.BaseProtocol:
            if len(http.connections) < MOST_CONNECTIONS:
                return http()
            traffic.refused += 1
            return _Refused()

        with _listening(path) as sock:
            # A cancelled call that also starts to serve would leave the event loop with a descriptor that is closed.
            server = await loop.create_unix_server(accepted, sock=sock, start_serving=False)
            try:
                await server.start_serving()
                yield traffic
            finally:
                server.close()
                await http.shutdown(timeout=0.1)
                with contextlib.suppress(OSError):
                    path.unlink()


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket at `path`, which may be longer than the 107 bytes that an address of a socket holds."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        yield sock
    finally:
        os.close(folder)
        sock.close()


class _Refused(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@dataclass(frozen=True)
class _Proxy:
    """Answers the requests of one episode."""

    client: aiohttp.ClientSession
    url: str
    allowed: Collection[tuple[str, str]]
    restart_timeout: float
    traffic: Traffic

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.traffic.on_request()
        path, _, query = request.raw_path.partition("?")
        if path == "/" and request.method in ("GET", "HEAD"):  # programs look whether anybody is there
            return web.Response(text="")
        if (request.method, path) not in self.allowed:
            self.traffic.refused += 1
            names = ", ".join(sorted(f"{method} {path}" for method, path in self.allowed))
            return _error(404, f"An isolated program cannot send {request.method} {path[:200]} here, only: {names}.")
        is_generation = (request.method, path) in GENERATIONS
        self.traffic.requests += 1
        self.traffic.generations += is_generation
        try:
            upstream = await self._sent(request, path + (f"?{query}" if query else ""))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"The server is away or closed the connection: {error}"
            if is_generation:
                self.traffic._ended(0, text)
            return _error(503, text)
        answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        status, said = upstream.status, bytearray()
        try:
            if not await _handed_on(upstream, request, answer, said):
                status, said[:] = 0, b"The server closed the connection."
        except ConnectionError as left:  # a program may end as soon as it has what it waited for
            logger.debug("The program closed the connection of %s: %s", request.path, left)
        finally:
            upstream.close()  # a server generates no further for a client that has left
            if is_generation:
                self.traffic._ended(status, said.decode(errors="replace")[:_MOST_ERROR_CHARACTERS])
        return answer

    async def _sent(self, request: web.BaseRequest, path: str) -> aiohttp.ClientResponse:
        """Return the beginning of the server's answer. Try again as long as there was no connection."""
        headers = [(name, value) for name, value in request.headers.items() if not _is_dropped(name.lower())]
        deadline = asyncio.get_running_loop().time() + self.restart_timeout
        while True:
            try:
                return await self.client.request(
                    request.method,
                    URL(self.url + path, encoded=True),
                    headers=headers,
                    data=request.content if request.body_exists else None,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT),
                    skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self.traffic.failed_connects += 1
                if asyncio.get_running_loop().time() + _RETRY_SECONDS > deadline:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)


def _is_dropped(name: str) -> bool:
    return name in _DROPPED or name.startswith(_DROPPED_PREFIXES)


async def _handed_on(
    upstream: aiohttp.ClientResponse, request: web.BaseRequest, answer: web.StreamResponse, error: bytearray
) -> bool:
    """Hand on an answer in the pieces in which it arrives, and add it to `error` if its status is an error.

    Return False if the answer broke: the client sees a closed connection, too. Raise ConnectionError if the client has
    closed the connection.
    """
    for name, value in upstream.headers.items():
        if name.lower() not in _NOT_RETURNED:
            answer.headers.add(name, value)
    await answer.prepare(request)
    while True:
        try:
            data = await upstream.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as lost:
            logger.debug("The answer of %s broke: %s", request.path, lost)
            if request.transport is not None:
                request.transport.abort()
            return False
        if not data:
            break
        if upstream.status >= 400 and len(error) < _MOST_ERROR_CHARACTERS:
            error += data
        await answer.write(data)
    await answer.write_eof()
    return True


def _error(status: int, message: str) -> web.Response:
    """Return an error in a shape that clients of OpenAI and of Anthropic read."""
    kind = "not_found_error" if status == 404 else "api_error"
    return web.json_response({"type": "error", "error": {"type": kind, "message": message}}, status=status)
