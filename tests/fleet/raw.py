"""Servers that write bytes as a test says, and a router on a socket of its own, all on the event loop of a test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from verl_server.fleet.keys import RouterKeys
from verl_server.fleet.members import Fleet, State
from verl_server.fleet.operations import server_operations
from verl_server.fleet.options import RouterArgs
from verl_server.fleet.router import Router
from verl_server.web.http_server import GuardedServer

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(content: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, headers, len(content), content)


@dataclass
class Call:
    """A request that is no look, and the connection that it came on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Close the connection as a process that was killed does."""
        self.writer.transport.abort()

    async def client_left(self) -> None:
        """Wait until the other end closes the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


async def says_its_name(call: Call) -> None:
    await call.send(whole(call.headers["host"].encode()))


@dataclass
class RawServer:
    behave: Callable[[Call], Awaitable[None]] = says_its_name
    """Answers each request that is no look. The connection stays open for the next request, if it is."""
    version: str = "1@00000001"
    instance: str = "run1"
    confirmed: bool = True
    reads_bodies: bool = True
    look: Callable[[], Awaitable[None]] | None = None
    """Called in each look after the server has taken its version for the answer."""
    looks: int = 0
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """End as a process that was killed does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        ends = asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        with contextlib.suppress(*ends):
            while not writer.is_closing():
                await self._one(reader, writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        size = int(headers.get("content-length", 0))
        body = await reader.readexactly(size) if self.reads_bodies else b""
        call = Call(method, path, headers, body, reader, writer)
        if path == "/weight_version":
            self.looks += 1
            told = {"weight_version": self.version, "instance_id": self.instance, "weights_confirmed": self.confirmed}
            if self.look is not None:
                await self.look()
            await call.send(whole(json.dumps(told).encode()))
        elif path == "/server_info":
            await call.send(whole(b"{}"))
        elif headers.get("x-verl-expected-instance", self.instance) != self.instance:
            await call.send(whole(b"{}", b"412 Precondition Failed", b"X-Verl-Error: ServerRestartedError\r\n"))
        else:
            self.calls.append(call)
            await self.behave(call)


@dataclass
class Live:
    """A router that listens."""

    fleet: Fleet
    router: Router
    server: GuardedServer
    serving: asyncio.Task[None]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until(self, holds: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait until something is true that no event tells of."""
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_states(self, *states: State) -> None:
        await self.until(lambda: [member.state for member in self.fleet.members] == list(states))

    async def connect(self, request: bytes, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own. `limit` bounds what the reader buffers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        writer.write(request)
        return reader, writer


@contextlib.asynccontextmanager
async def live(*servers: RawServer, graceful: int = 1, **options: Any) -> AsyncIterator[Live]:
    """Start the servers and a router. `options` are those of `RouterArgs`."""
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.callback(server.stop)
        args = RouterArgs(server=tuple(server.url for server in servers), **{"probe_interval": 0.2} | options)
        keys = RouterKeys(args)
        fleet = Fleet(args, keys.of_router)
        router = Router(fleet, keys, server_operations())
        sock = socket.create_server(("127.0.0.1", 0))
        settings: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_level": "critical", "access_log": False}
        guarded = GuardedServer(router, 10_000, timeout_graceful_shutdown=graceful, date_header=False, **settings)
        serving = asyncio.ensure_future(guarded.serve([sock]))
        fleet.start()
        found = Live(fleet, router, guarded, serving, sock.getsockname()[1])
        try:
            await found.until(lambda: guarded.started)
            await found.until_states(*[State.HEALTHY] * len(servers))
            await found.until(lambda: all(member.info for member in fleet.members))
            await fleet.look_now()  # so that nothing changes any more
            yield found
        finally:
            guarded.should_exit = guarded.force_exit = True
            await asyncio.wait([serving], timeout=10)
            await fleet.stop()


def post(path: str, body: bytes = b"{}", headers: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
    return head % (path.encode(), headers, len(body)) + body
