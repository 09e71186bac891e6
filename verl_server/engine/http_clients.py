"""Connections for generation: one httpx client for all threads, and one for each event loop.

`engine.http_transport` uses them. Made for rollouts: connections are not capped and kept alive, no read has a bound
unless it is given one, and a host that vanished is noticed by keep-alive probes. (Control calls go over
`http_connection`.)
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import AsyncGenerator

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

CONNECT_TIMEOUT = 30.0
_KEEP_ALIVE_EXPIRY = 60.0
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_EXPIRY)
KEEP_ALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):  # a host that vanished ends the wait after about two minutes
    KEEP_ALIVE_OPTIONS += [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ]


class HttpClients:
    def __init__(self, url: str) -> None:
        self._url = url
        self.for_threads = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            transport=httpx.HTTPTransport(limits=_LIMITS, socket_options=KEEP_ALIVE_OPTIONS),
        )
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[AsyncGenerator[httpx.AsyncClient, None], httpx.AsyncClient]
        ] = weakref.WeakKeyDictionary()

    async def for_this_loop(self) -> httpx.AsyncClient:
        """The running loop's client: connections belong to the loop that opened them, and end with it."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            client = httpx.AsyncClient(
                base_url=self._url,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
                transport=AiohttpTransport(client=_aiohttp_session),
            )
            # asyncio.run closes the async generators of its loop at the end: that is when the client closes.
            lifetime = _open_until_closed(client)
            self._by_loop[loop] = lifetime, await anext(lifetime)
        return self._by_loop[loop][1]

    def close(self) -> None:
        """Close all connections; calls that wait for an answer end with an error."""
        self.for_threads.close()
        for loop, (lifetime, _) in list(self._by_loop.items()):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_close(lifetime), loop)


async def _open_until_closed(client: httpx.AsyncClient) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client:
        yield client


async def _close(lifetime: AsyncGenerator[httpx.AsyncClient, None]) -> None:
    await lifetime.aclose()


def _aiohttp_session() -> aiohttp.ClientSession:
    """httpx on aiohttp's connections: httpx's own pool looks at every connection for every request, which at 256
    requests in flight leaves a few hundred a second of 4,000. No cap, and POST is never retried."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_EXPIRY, socket_factory=_socket)
    return aiohttp.ClientSession(connector=connector)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices, by keep-alive probes, that the server's host vanished during a long generation."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    for option in KEEP_ALIVE_OPTIONS:
        sock.setsockopt(*option)
    return sock
