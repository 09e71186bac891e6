"""Kept connections for control calls, against a server that behaves as real servers do only in rare cases."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_server.engine.http_connection import Answer, HttpConnections
from verl_server.errors import BadRequestError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: test\r\n\r\nhi"


class Server:
    """Answers each request with what `behave` returns: bytes to send, None for no answer, "close" to disconnect."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.behave: Callable[[bytes], bytes | str | None] = lambda request: OK
        self.connections: list[socket.socket] = []
        self.requests: list[bytes] = []
        self.got_request = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # `close` closed the connection
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        while data := connection.recv(65536):  # the client sends a request in one piece
            self.requests.append(data)
            self.got_request.set()
            answer = self.behave(data)
            if answer == "close":
                connection.close()
                return
            if isinstance(answer, bytes):
                connection.sendall(answer)

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def connections(server: Server) -> Iterator[HttpConnections]:
    connections = HttpConnections(server.url, 5, [])
    yield connections
    connections.close()


def ask(connections: HttpConnections, timeout: float = 10) -> Answer:
    return connections.request("POST", "/path", b'{"a":1}', {"Authorization": "Bearer key"}, timeout)


def test_requests_share_a_connection(server: Server, connections: HttpConnections) -> None:
    for _ in range(3):
        answer = ask(connections)
        assert (answer.status_code, answer.text, answer.headers.get("x-kind")) == (200, "hi", "test")
    assert len(server.connections) == 1
    host = server.url.removeprefix("http://")
    head = f"POST /path HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer key\r\nContent-Length: 7\r\n\r\n"
    assert server.requests == [head.encode() + b'{"a":1}'] * 3


def test_calls_at_the_same_time_have_a_connection_each(server: Server, connections: HttpConnections) -> None:
    together = threading.Barrier(3)

    def behave(request: bytes) -> bytes:
        together.wait(10)
        return OK

    server.behave = behave
    with ThreadPoolExecutor(3) as pool:
        assert [job.result(20).text for job in [pool.submit(ask, connections) for _ in range(3)]] == ["hi"] * 3
    assert len(server.connections) == 3


def test_an_idle_connection_that_was_closed_is_replaced(server: Server, connections: HttpConnections) -> None:
    ask(connections)
    server.connections[0].shutdown(socket.SHUT_RDWR)
    assert ask(connections).text == "hi"
    assert len(server.connections) == 2


def test_a_server_that_says_close_is_believed(server: Server, connections: HttpConnections) -> None:
    server.behave = lambda request: OK.replace(b"X-Kind: test", b"Connection: close")
    ask(connections)
    ask(connections)
    assert len(server.connections) == 2


def test_nothing_is_sent_twice(server: Server, connections: HttpConnections) -> None:
    ask(connections)
    server.behave = lambda request: "close"
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(connections)
    assert len(server.requests) == 2


def test_silence_is_a_timeout_and_the_late_answer_is_nobodys(server: Server, connections: HttpConnections) -> None:
    server.behave = lambda request: None
    with pytest.raises(TimeoutError):
        ask(connections, timeout=0.05)
    server.behave = lambda request: OK
    assert ask(connections).text == "hi"
    assert len(server.connections) == 2


def test_close_ends_a_call_that_waits(server: Server, connections: HttpConnections) -> None:
    server.behave = lambda request: None
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask, connections)
        assert server.got_request.wait(10)
        connections.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            job.result(10)


def test_a_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        ask(HttpConnections(f"http://127.0.0.1:{port}", 5, []))


def test_line_breaks_cannot_make_headers(server: Server, connections: HttpConnections) -> None:
    with pytest.raises(BadRequestError, match="line break"):
        connections.request("POST", "/path", b"", {"Authorization": "Bearer a\r\nX-Evil: 1"}, 5)
    assert ask(connections).text == "hi"


@pytest.mark.parametrize(
    ("answer", "text", "stays_open"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "hi", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, "hi", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", "hi", False),
        (b"HTTP/1.1 400 Oh\r\nContent-Length: 0\r\nX-Kind: a\r\nx-kind: b\r\n\r\n", "", True),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "", False),
    ],
)
def test_answers_of_every_form_are_read(
    server: Server, connections: HttpConnections, answer: bytes, text: str, stays_open: bool
) -> None:
    server.behave = lambda request: answer
    for _ in range(2):
        assert ask(connections).text == text
    assert len(server.connections) == (1 if stays_open else 2)


def test_an_answer_may_come_in_parts(server: Server, connections: HttpConnections) -> None:
    body = bytes(300_000)
    whole = b"HTTP/1.1 200 OK\r\nX-Kind: first\r\nX-Kind: second\r\nContent-Length: 300000\r\n\r\n" + body

    def behave(request: bytes) -> bytes:
        for start in (0, 20, 90):  # inside of the head, and at the body
            server.connections[0].sendall(whole[start : {0: 20, 20: 90, 90: 1000}[start]])
            time.sleep(0.02)
        return whole[1000:]

    server.behave = behave
    for _ in range(2):
        answer = ask(connections)
        assert (answer.content, answer.headers.get("x-kind")) == (body, "first")
    assert len(server.connections) == 1


def test_an_answer_that_breaks_off_is_no_answer(server: Server, connections: HttpConnections) -> None:
    def behave(request: bytes) -> str:
        server.connections[0].sendall(OK[:-1])
        return "close"

    server.behave = behave
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(connections)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Kind: test\r\n\r\n"


def parts_of(connections: HttpConnections) -> list[bytes]:
    with connections.stream("/path", b"{}", {}, 10) as (answer, parts):
        assert (answer.status_code, answer.headers.get("x-kind")) == (200, "test")
        return list(parts)


def test_a_stream_arrives_in_parts_and_its_connection_is_kept(server: Server, connections: HttpConnections) -> None:
    first_is_read = threading.Event()

    def behave(request: bytes) -> bytes:
        server.connections[0].sendall(CHUNKED + b"2\r\nhi\r\n")
        assert first_is_read.wait(10)
        return b"3\r\nyou\r\n0\r\n\r\n"

    server.behave = behave
    with connections.stream("/path", b"{}", {}, 10) as (_, parts):
        assert next(parts) == b"hi"
        first_is_read.set()
        assert list(parts) == [b"you"]
    assert parts_of(connections) == [b"hi", b"you"]
    assert len(server.connections) == 1


@pytest.mark.parametrize("cut_off", [CHUNKED + b"2\r\nhi\r\n", OK[:-1]])
def test_a_stream_that_breaks_off_raises(server: Server, connections: HttpConnections, cut_off: bytes) -> None:
    def behave(request: bytes) -> str:
        server.connections[0].sendall(cut_off)
        return "close"

    server.behave = behave
    with pytest.raises((OSError, http.client.HTTPException)):
        parts_of(connections)


def test_a_stream_that_is_left_early_closes_its_connection(server: Server, connections: HttpConnections) -> None:
    server.behave = lambda request: CHUNKED + b"2\r\nhi\r\n"
    with connections.stream("/path", b"{}", {}, 10) as (_, parts):
        assert next(parts) == b"hi"
    server.behave = lambda request: OK
    assert ask(connections).text == "hi"
    assert len(server.connections) == 2


def test_an_error_of_a_stream_has_its_content(server: Server, connections: HttpConnections) -> None:
    server.behave = lambda request: b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno"
    with connections.stream("/path", b"{}", {}, 10) as (answer, _):
        assert (answer.status_code, answer.text) == (400, "no")


def test_idle_connections_expire(server: Server, connections: HttpConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.engine.http_connection.KEEP_ALIVE_EXPIRY", -1.0)
    ask(connections)
    assert connections._idle == []
    ask(connections)
    assert len(server.connections) == 2
