"""Whatever arrives before an application sees it is bounded, in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from verl_server.web import acceptor, http_protocol
from verl_server.web.http_server import GuardedServer

PLAIN = b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class App:
    """Answers with the number of bytes of the body, and keeps the scopes."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message.get("more_body", False)
        body = str(size).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@contextlib.asynccontextmanager
async def served(app: App, limit: int = 100) -> AsyncIterator[Connect]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = GuardedServer(app, limit, lifespan="off", ws="none", log_level="critical", access_log=False)
        serving = asyncio.ensure_future(server.serve([sock]))
        async with asyncio.timeout(30):
            while not server.started and not serving.done():
                await asyncio.sleep(0)
            try:
                yield lambda: asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
            finally:
                server.should_exit = True
                await serving


async def answer(connect: Connect, *parts: bytes, repeat: bytes = b"", times: int = 0) -> bytes:
    """Send `parts`, then `repeat` up to `times` times. Return what comes back until the server closes."""
    reader, writer = await connect()
    reading = asyncio.ensure_future(reader.read())
    with contextlib.suppress(ConnectionError):
        for part in (*parts, *(repeat for _ in range(times))):
            writer.write(part)
            await writer.drain()
            if reading.done():
                break
    with contextlib.suppress(ConnectionError):
        return await reading
    return b""


async def ask(connect: Connect, request: bytes) -> bytes:
    """Send one request, and return the answer's body of a known length."""
    reader, writer = await connect()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    writer.close()
    return body


PIECE = b"a" * 65536
ENDLESS = {
    "a header's value": ([b"GET / HTTP/1.1\r\nX: "], PIECE),
    "a header's name": ([b"GET / HTTP/1.1\r\n"], PIECE),
    "the path": ([b"GET /"], PIECE),
    "the method": ([], PIECE),
    "small headers": ([b"GET / HTTP/1.1\r\n"], b"A: b\r\n" * 1000),
    "a trailer": ([CHUNKED + b"1\r\na\r\n0\r\nT: "], PIECE),
    "small trailers": ([CHUNKED + b"1\r\na\r\n0\r\n"], b"A: b\r\n" * 1000),
    "the extension of a chunk": ([CHUNKED + b"1;"], PIECE),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_no_part_of_a_request_is_endless(name: str) -> None:
    start, repeat = ENDLESS[name]

    async def run() -> None:
        app = App()
        async with served(app) as connect:
            times = 400 * 65536 // len(repeat)
            found = await answer(connect, *start, repeat=repeat, times=times)
            assert found == b"" or found.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), found[:100]
            assert await ask(connect, PLAIN) == b"0"
        assert all(len(scope["headers"]) <= http_protocol.MOST_HEADERS for scope in app.scopes)

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers", [b"A: b\r\n" * (http_protocol.MOST_HEADERS + 1), b"A: " + b"b" * (http_protocol.MOST_HEAD_BYTES + 1)]
)
def test_a_head_that_is_too_large_reaches_no_application(headers: bytes) -> None:
    async def run() -> None:
        app = App()
        async with served(app) as connect:
            body = b"Content-Length: 3\r\n\r\nabc"
            found = await answer(connect, b"POST / HTTP/1.1\r\n" + headers.rstrip() + b"\r\n" + body)
            assert found.startswith(b"HTTP/1.1 431 "), found[:100]
            assert b"bytes of headers" in found
        assert app.scopes == []

    asyncio.run(run())


def test_a_refused_request_adds_nothing_to_the_one_before_it() -> None:
    async def run() -> None:
        app = App()
        first = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        second = b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"Content-Length: 3\r\n\r\ndef"
        async with served(app) as connect:
            await answer(connect, first + second)
        assert len(app.scopes) == 1

    asyncio.run(run())


def test_honest_requests_pass() -> None:
    async def run() -> None:
        async with served(App()) as connect:
            large = b"POST / HTTP/1.1\r\nContent-Length: 3000000\r\nX: " + b"y" * 60000 + b"\r\n\r\n"
            assert await ask(connect, large + b"z" * 3_000_000) == b"3000000"
            chunks = b"".join(b"3;e=1\r\nabc\r\n" for _ in range(30_000))
            assert await ask(connect, CHUNKED + chunks + b"0\r\nT: 1\r\n\r\n") == b"90000"

    asyncio.run(run())


@pytest.mark.parametrize(("sent", "expected"), [(b"", b""), (b"GET / HTTP/1.1\r\nX: ", b"HTTP/1.1 408 ")])
def test_a_head_that_never_ends_is_ended(sent: bytes, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)

    async def run() -> None:
        async with served(App()) as connect:
            found = await answer(connect, sent)
            assert found.startswith(expected) if expected else found == b""
            reader, writer = await connect()  # after a request, too
            writer.write(PLAIN + sent)
            found = await reader.read() if sent else b"HTTP/1.1 200 HTTP/1.1 408"
            assert found.count(b"HTTP/1.1 ") == 2

    asyncio.run(run())


def test_idle_connections_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_FIRST_SECONDS", 0.0)

    async def run() -> None:
        async with served(App(), limit=4) as connect:
            half_open = [await connect() for _ in range(4)]
            for _, writer in half_open[:2]:
                writer.write(b"GET / HTTP/1.1\r\nX: ")
            assert await ask(connect, PLAIN) == b"0"

    asyncio.run(run())


class Held(App):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.entered = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.release()
        await self.gate.wait()
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("half_open", [3, 0])
def test_connections_in_use_give_way_only_if_no_other_does(half_open: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(acceptor, "_IDLE_SECONDS", 1000.0 if half_open else 0.0)
    make_room = acceptor.Acceptor._make_room

    async def run() -> None:
        app, is_full = Held(), asyncio.Event()

        def noted(self: acceptor.Acceptor) -> None:
            make_room(self)
            is_full.set()

        monkeypatch.setattr(acceptor.Acceptor, "_make_room", noted)
        async with served(app, limit=4) as connect:
            in_use = []
            for _ in range(4 - half_open):
                in_use.append(await connect())
                in_use[-1][1].write(PLAIN)
                await app.entered.acquire()
            waiting = [await connect() for _ in range(half_open)]
            newcomer = asyncio.ensure_future(ask(connect, PLAIN))
            await is_full.wait()
            app.gate.set()
            assert await newcomer == b"0"
            reader, writer = in_use[0]
            writer.write(PLAIN)
            found = await reader.read() if not half_open else await _answers(reader, 2)
            assert found.count(b"HTTP/1.1 200") == (2 if half_open else 1)
            assert (b"connection: close" in found.lower()) == (not half_open), "the answer says that it is the last one"
            for _, waiting_writer in waiting:
                waiting_writer.close()

    asyncio.run(run())


async def _answers(reader: asyncio.StreamReader, count: int) -> bytes:
    """Return what comes up to the end of `count` answers with a body of one byte."""
    found = b""
    for _ in range(count):
        found += await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(1)
    return found
