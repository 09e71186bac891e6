"""The HTTP client under hundreds of requests: connections are kept, faults are named, nothing is retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from verl_server.http_transport import KeepAliveTransport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """A TCP server that counts connections and requests and answers with `answer`."""

    def __init__(self, answer: Callable[[bytes], bytes | None] = lambda _: OK) -> None:
        self.connections = self.requests = self.open = 0
        self.all_closed = asyncio.Event()
        self._answer = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                answer = self._answer(body)
                if answer is None:
                    await reader.read()  # until the client gives up
                    return
                writer.write(answer)
                if answer == b"":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.open -= 1
            if self.open == 0:
                self.all_closed.set()


@asynccontextmanager
async def client_of(server: Server, timeout: float = 10.0) -> AsyncIterator[httpx.AsyncClient]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    transport = KeepAliveTransport(keepalive_expiry=60.0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=timeout) as client:
        yield client
    listener.close()


def test_connections_are_reused() -> None:
    async def main() -> None:
        server = Server()
        async with client_of(server) as client:
            for _ in range(5):
                assert (await client.post("/", content=b"x" * 100_000)).text == "ok"
        assert (server.connections, server.requests) == (1, 5)

    asyncio.run(main())


def test_hundreds_of_requests_at_once() -> None:
    async def main() -> None:
        server = Server(lambda body: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        async with client_of(server) as client:
            for _ in range(3):
                answers = await asyncio.gather(*(client.post("/", content=str(i)) for i in range(400)))
                assert [answer.text for answer in answers] == [str(i) for i in range(400)]
        assert server.connections <= 400
        assert server.requests == 1200

    asyncio.run(main())


def test_a_chunked_answer_streams() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"

    async def main() -> None:
        server = Server(lambda _: answer)
        async with client_of(server) as client:
            for _ in range(2):
                async with client.stream("POST", "/") as response:
                    assert b"".join([chunk async for chunk in response.aiter_bytes()]) == b"abcde"
        assert server.connections == 1

    asyncio.run(main())


def test_connection_close_is_honoured() -> None:
    async def main() -> None:
        server = Server(lambda _: OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n", 1))
        async with client_of(server) as client:
            for _ in range(2):
                assert (await client.get("/")).text == "ok"
        assert server.connections == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"nonsense\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", httpx.ReadTimeout),
        (None, httpx.ReadTimeout),
    ],
)
def test_faults_are_httpx_errors_and_not_retried(answer: bytes | None, error: type[Exception]) -> None:
    async def main() -> None:
        server = Server(lambda _: answer)
        async with client_of(server, timeout=0.3) as client:
            with pytest.raises(error):
                await client.post("/", content=b"x")
        assert server.requests == 1
        await asyncio.wait_for(server.all_closed.wait(), 5)

    asyncio.run(main())


def test_a_refused_connection_is_a_connect_error() -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=KeepAliveTransport(60.0)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:9")

    asyncio.run(main())


def test_cancelling_closes_the_connection() -> None:
    async def main() -> None:
        server = Server(lambda _: None)
        async with client_of(server) as client:
            task = asyncio.create_task(client.post("/", content=b"x"))
            while not server.requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(server.all_closed.wait(), 5)

    asyncio.run(main())
