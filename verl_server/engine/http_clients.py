"""HTTP clients of event loops: one for each loop.

`engine.http_transport` sends the requests of coroutines over these clients. It sends the requests of threads over
`http_connection`. A rollout has many long requests. Therefore the number of connections has no limit, idle connections
are kept for the next request, and a read has no timeout unless the caller sets one. Keep-alive probes detect a host
that no longer responds.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import weakref
from collections.abc import AsyncGenerator

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

CONNECT_TIMEOUT = 30.0
"""Seconds to wait for a connection."""
KEEP_ALIVE_EXPIRY = 60.0
"""Seconds after which an idle connection is closed."""
KEEP_ALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):  # 60 s + 4 probes, 15 s apart: a lost host ends the wait after two minutes
    KEEP_ALIVE_OPTIONS += [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ]


class LoopClients:
    """The clients of one server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[AsyncGenerator[httpx.AsyncClient, None], httpx.AsyncClient]
        ] = weakref.WeakKeyDictionary()

    async def for_this_loop(self) -> httpx.AsyncClient:
        """Return the running loop's client. A connection belongs to the event loop that opened it."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            client = httpx.AsyncClient(
                base_url=self._url,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
                transport=aiohttp_transport(),
            )
            # asyncio.run closes the loop's async generators at its end. The client closes with this generator.
            lifetime = _open_until_closed(client)
            self._by_loop[loop] = lifetime, await anext(lifetime)
        return self._by_loop[loop][1]

    def close(self) -> None:
        """Close all connections. Calls that wait for an answer raise an error."""
        for loop, (lifetime, _) in list(self._by_loop.items()):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_close(lifetime), loop)


async def _open_until_closed(client: httpx.AsyncClient) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client:
        yield client


async def _close(lifetime: AsyncGenerator[httpx.AsyncClient, None]) -> None:
    await lifetime.aclose()


def aiohttp_transport(limit: int = 0) -> AiohttpTransport:
    """Return a transport for one `httpx.AsyncClient`, with aiohttp's connections. It does not retry POST.

    httpx's own pool scans all connections for each request. With 256 concurrent requests the pool reaches a few hundred
    requests a second, and aiohttp reaches 4,000. `limit` is the most connections, 0 for no limit.
    """
    return AiohttpTransport(verify=certificates(), client=functools.partial(aiohttp_session, limit))


def aiohttp_session(
    limit: int = 0, *, force_close: bool = False, auto_decompress: bool = True
) -> aiohttp.ClientSession:
    """Return a session of aiohttp with the certificates and the keep-alive probes of this package.

    `limit` is the most connections, 0 for no limit. With `force_close`, each request has a connection of its own, so
    that a request that finds no connection was not sent.
    """
    connector = aiohttp.TCPConnector(
        limit=limit,
        ssl=certificates(),
        force_close=force_close,
        keepalive_timeout=None if force_close else KEEP_ALIVE_EXPIRY,
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(connector=connector, auto_decompress=auto_decompress)


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return the certificates of all clients. Loading them holds an event loop for about 50 ms, so it happens once."""
    return httpx.create_ssl_context()


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose keep-alive probes detect, during a long generation, that the server's host is lost."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    for option in KEEP_ALIVE_OPTIONS:
        sock.setsockopt(*option)
    return sock
