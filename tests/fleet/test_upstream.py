"""The router's connections to a server: reuse, framing, breaks, and what they hold while nobody reads."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fleet.fakes import run
from tests.fleet.raw import LAST_CHUNK, STREAM_HEAD, Call, RawServer, chunk, whole
from verl_server.errors import ServerDiedError
from verl_server.fleet.members import Fleet
from verl_server.fleet.options import RouterArgs
from verl_server.fleet.upstream import Connection, Exchange, Upstream


async def ask(upstream: Upstream, method: str = "POST", body: bytes = b"") -> tuple[int, bytes]:
    async with asyncio.timeout(10):
        exchange = await upstream.send(method, b"/generate", [], body)
        try:
            await exchange.started()
            return exchange.status, await exchange.whole(2**30)
        finally:
            exchange.close()


def with_server(
    behave: Callable[[Call], Awaitable[None]], act: Callable[[RawServer, Upstream], Awaitable[Any]], **settings: Any
) -> Any:
    async def main() -> Any:
        server = RawServer(behave, **settings)
        await server.start()
        upstream = Upstream(server.url, 5)
        try:
            return await act(server, upstream)
        finally:
            upstream.close("the test is over")
            server.stop()

    return run(main())


def answers(data: bytes, *, closes: bool = False) -> Callable[[Call], Awaitable[None]]:
    async def behave(call: Call) -> None:
        await call.send(data)
        if closes:
            call.writer.close()

    return behave


FRAMES: list[tuple[str, bytes, bool, int, bytes]] = [
    ("POST", whole(b"abc"), False, 200, b"abc"),
    ("POST", STREAM_HEAD + chunk(b"ab") + chunk(b"c") + LAST_CHUNK, False, 200, b"abc"),
    ("POST", b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b""),
    ("POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + whole(b"abc"), False, 200, b"abc"),
    ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", False, 200, b""),
    ("POST", b"HTTP/1.1 200 OK\r\n\r\nabc", True, 200, b"abc"),
    ("POST", b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", True, 200, b"abc"),
    ("POST", whole(b"abc", headers=b"Connection: close\r\n"), True, 200, b"abc"),
    ("POST", whole(b"abc"), True, 200, b"abc"),
]


@pytest.mark.parametrize(("method", "data", "closes", "status", "content"), FRAMES)
def test_answers_end_where_they_say(method: str, data: bytes, closes: bool, status: int, content: bytes) -> None:
    async def twice(server: RawServer, upstream: Upstream) -> None:
        assert await ask(upstream, method) == (status, content)
        async with asyncio.timeout(10):
            while closes and any(connection.is_open for connection in upstream._idle):
                await asyncio.sleep(0.005)  # the server closes it without having said so
        assert await ask(upstream, method) == (status, content)
        assert server.connections == (2 if closes or method == "HEAD" else 1)

    with_server(answers(data, closes=closes), twice)


@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Le", whole(b"abc")[:-1], STREAM_HEAD + chunk(b"ab"), b"no HTTP\r\n\r\n"],
)
def test_an_answer_without_its_end_is_none(data: bytes) -> None:
    async def behave(call: Call) -> None:
        await call.send(data)
        call.writer.close()

    async def once(server: RawServer, upstream: Upstream) -> None:
        with pytest.raises(ServerDiedError):
            await ask(upstream)
        assert server.connections == 1

    with_server(behave, once)


def test_a_connection_that_is_reset_at_once_ends_the_request() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            upstream = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}", 5)
            loop = asyncio.get_running_loop()
            for _ in range(20):
                asked = asyncio.ensure_future(ask(upstream))
                connection, _ = await loop.sock_accept(listener)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
                with pytest.raises(ServerDiedError):
                    await asked

    run(main())


def test_a_server_that_answers_before_it_has_read_the_request_is_not_asked_again_on_that_connection() -> None:
    async def act(server: RawServer, upstream: Upstream) -> None:
        assert await ask(upstream, body=bytes(64 * 2**20)) == (413, b"")
        assert await ask(upstream) == (413, b"")
        assert server.connections == 2

    async def too_large(call: Call) -> None:
        await call.send(whole(b"", b"413 Content Too Large"))
        if int(call.headers["content-length"]):
            await call.client_left()

    with_server(too_large, act, reads_bodies=False)


def test_a_request_that_is_given_up_is_not_sent_to_its_end() -> None:
    read: list[int] = []

    async def reads_late(call: Call) -> None:
        await given_up.wait()
        total = 0
        try:
            while data := await call.reader.read(2**20):
                total += len(data)
        except ConnectionError:
            pass
        read.append(total)
        done.set()

    async def act(server: RawServer, upstream: Upstream) -> None:
        exchange = await upstream.send("POST", b"/generate", [], bytes(64 * 2**20))
        async with asyncio.timeout(10):
            while not server.calls:
                await asyncio.sleep(0.005)
            exchange.close()
            given_up.set()
            await done.wait()

    given_up, done = asyncio.Event(), asyncio.Event()
    with_server(reads_late, act, reads_bodies=False)
    assert read[0] < 32 * 2**20


class FakeTransport:
    def __init__(self) -> None:
        self.is_paused = self.is_aborted = False
        self.written = b""

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        self.is_aborted = True


def test_a_connection_whose_answer_was_left_unread_reads_the_next_one() -> None:
    async def main() -> None:
        connection, transport = Connection(asyncio.get_running_loop()), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        upstream = Upstream("http://127.0.0.1:1", 5)
        exchange = Exchange(upstream, connection, answers_body=True)
        connection.begin(exchange, b"head", b"")
        for start in range(0, 600_000, 200_000):
            connection.data_received(whole(bytes(500_000))[start : start + 200_000])
        assert transport.is_paused, "nobody reads it"
        exchange.close()
        later = await upstream.send("GET", b"/", [], b"")
        assert later._connection is connection and not transport.is_paused

    run(main())


def test_reading_stops_while_nobody_takes_the_content() -> None:
    """And it goes on afterwards: nothing is lost."""
    sent = 0

    async def streams(call: Call) -> None:
        nonlocal sent
        await call.send(STREAM_HEAD)
        for _ in range(1024):
            await call.send(chunk(bytes(65536)))
            sent += 65536
        await call.send(LAST_CHUNK)

    async def act(server: RawServer, upstream: Upstream) -> None:
        exchange = await upstream.send("POST", b"/generate", [], b"")
        await exchange.started()
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 32 * 2**20, "what the kernel buffers"
        assert len(await exchange.whole(2**30)) == 64 * 2**20
        exchange.close()

    with_server(streams, act)


def test_servers_with_https_are_spoken_to_in_tls() -> None:
    for url, is_tls in (("https://localhost:1", True), ("http://localhost:1", False)):
        (member,) = Fleet(RouterArgs(server=(url,))).members
        assert (member.upstream._tls is not None) is is_tls
