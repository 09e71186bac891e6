"""A server and an adapter that start with few file descriptors hold hundreds of connections at a time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Stack
from verl_server import HttpServerEngineAdapter, ServerUnavailableError
from verl_server.engine import http_clients
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.ipc.sockets import bind_socket
from verl_server.server import http_process
from verl_server.server.http_process import HttpServer
from verl_server.web.acceptor import Acceptor

CLIENTS = 400
BODY = b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}'
REQUEST = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: " + str(len(BODY)).encode() + b"\r\n\r\n" + BODY
)


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """Set a soft limit that leaves this process about 100 descriptors, and restore the previous limit afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(int(name) for name in os.listdir("/proc/self/fd")) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield soft
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def served(stack: Stack) -> Iterator[int]:
    with bind_socket("127.0.0.1", 0) as sock:
        server = HttpServer(stack.manager, stack.args, sock)
        server.start()
        yield sock.getsockname()[1]
        server.end()


async def answers(port: int) -> collections.Counter[str]:
    """Count the status lines of the answers to requests of clients that are all connected before the first one ends.

    Each request is sent with its connection: a server without free descriptors ends connections that send none.
    """
    sockets = []
    for _ in range(CLIENTS):
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        sockets[-1].sendall(REQUEST)

    async def ask(sock: socket.socket) -> str:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            line = await reader.readline()
            await reader.readuntil(b"meta_info")  # the body has arrived
            return line.decode().strip()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            return type(error).__name__
        finally:
            writer.close()

    async with asyncio.timeout(60):
        return collections.Counter(await asyncio.gather(*map(ask, sockets)))


def test_the_server_raises_its_limit(stack: Stack, soft_limit: int) -> None:
    with served(stack) as port:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > soft_limit
        assert asyncio.run(answers(port)) == {"HTTP/1.1 200 OK": CLIENTS}


def test_connections_beyond_a_hard_limit_wait(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_descriptor_limit()  # the clients run in this process
    monkeypatch.setattr(http_process, "raise_descriptor_limit", lambda *_: 128)
    with served(stack) as port:
        assert asyncio.run(answers(port)) == {"HTTP/1.1 200 OK": CLIENTS}


def test_the_adapter_raises_its_limit(stack: Stack, soft_limit: int) -> None:
    with served(stack) as port:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        async def generate() -> list[Any]:
            with HttpServerEngineAdapter.attach(f"http://127.0.0.1:{port}") as adapter:
                greedy = {"max_new_tokens": 2}
                calls = (adapter.async_generate(input_ids=[5], sampling_params=greedy) for _ in range(CLIENTS))
                return await asyncio.gather(*calls)

        assert all(result["output_ids"] == [6, 7] for result in asyncio.run(generate()))


def test_the_adapter_says_that_it_has_no_descriptor_left(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(address: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(http_clients, "_socket", no_socket)
    refused = pytest.raises(ServerUnavailableError, match="ulimit -Hn")
    with served(stack) as port, HttpServerEngineAdapter.attach(f"http://127.0.0.1:{port}") as adapter, refused:
        asyncio.run(adapter.async_generate(input_ids=[5]))


class ListeningSocket(socket.socket):
    """Fails once for lack of descriptors and once because the client has disconnected, then accepts connections."""

    def __init__(self) -> None:
        super().__init__(fileno=socket.create_server(("127.0.0.1", 0)).detach())
        self.errors = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            raise self.errors.pop(0)
        return super().accept()


def test_a_connection_waits_while_the_system_has_no_descriptor(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        connected = asyncio.Event()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transport.close()
                connected.set()

        with ListeningSocket() as listening, socket.create_connection(listening.getsockname()):
            acceptor = Acceptor(loop, listening, Protocol, [], limit=10)
            async with asyncio.timeout(10):
                await connected.wait()
            acceptor.close()

    asyncio.run(run())
    (text,) = (record.getMessage() for record in caplog.records)
    assert "New connections wait" in text and "Too many open files" in text
