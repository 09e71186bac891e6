"""HTTP connections for calls of threads. They are kept open between calls.

`engine.http_transport` uses them for all requests that no event loop sends. A call uses an idle connection or opens
one, so calls of several threads run at the same time. No request is sent twice. A weight push is one small request, so
the client must be fast: httpx needs half a millisecond or more for such a request, several times as long as this.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import overload
from urllib.parse import urlsplit

from verl_server.engine.http_clients import KEEP_ALIVE_EXPIRY, certificates
from verl_server.errors import BadRequestError
from verl_server.web.numbers import whole_number

_PEEKED = 1 << 16
"""Number of bytes in which the head of an answer is searched. `http.client` reads an answer with a longer head."""


class Headers:
    """The headers of an answer. If a header is repeated, its first value is used."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, str] = {}
        for name, value in pairs:
            self._values.setdefault(name.lower(), value)

    @overload
    def get(self, name: str) -> str | None: ...

    @overload
    def get(self, name: str, default: str) -> str: ...

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name.lower(), default)


@dataclass(frozen=True)
class Answer:
    """A complete HTTP response."""

    status_code: int
    headers: Headers
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8."""
        return self.content.decode("utf-8", "replace")


class HttpConnections:
    """Connections to one server. Methods may be called from any thread.

    The number of connections has no limit, because a rollout has many long requests.
    """

    def __init__(self, url: str, connect_timeout: float, socket_options: Iterable[tuple[int, int, int]]) -> None:
        self._url = urlsplit(url)
        self._connect_timeout = connect_timeout
        self._socket_options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), *socket_options]
        self._tls: ssl.SSLContext | None = certificates() if self._url.scheme == "https" else None
        self._idle: list[tuple[float, socket.socket]] = []
        """Idle connections as (time of the last answer, connection), the oldest first."""
        self._used: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False

    def request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float | None
    ) -> Answer:
        """Send a request and return the answer.

        Each wait for the server takes at most `timeout` seconds. None is unbounded.

        Raise TimeoutError if the server is silent, and another OSError or http.client.HTTPException if the server
        cannot be reached or the connection breaks.
        """
        connection, keep = self._take(), False
        try:
            self._send(connection, method, path, body, headers, timeout)
            answer, keep = _read_plain(connection) or _read_any(connection, method)
            keep = keep and answer.status_code < 500  # uvicorn closes the connection after an exception, unannounced
        finally:
            self._give_back(connection, keep)
        return answer

    @contextlib.contextmanager
    def stream(
        self, path: str, body: bytes | None, headers: dict[str, str], timeout: float | None
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """Send a POST request. The block gets the answer, and an iterator of the parts of its content as they arrive.

        If the status is an error, the answer has the whole content instead. Raise the errors of `request`, also while
        the parts are read.
        """
        connection, keep = self._take(), False
        try:
            self._send(connection, "POST", path, body, headers, timeout)
            with http.client.HTTPResponse(connection, method="POST") as response:
                response.begin()
                content = response.read() if response.status >= 400 else b""
                yield Answer(response.status, Headers(response.headers.items()), content), _parts(response)
                keep = response.isclosed() and not response.will_close
        finally:
            self._give_back(connection, keep)

    def close(self) -> None:
        """Close all connections. Calls that wait for an answer raise an error."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        for _, connection in idle:
            connection.close()

    def _send(
        self,
        connection: socket.socket,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: float | None,
    ) -> None:
        connection.settimeout(timeout)
        # Head and body in one write: two writes would wake the server twice.
        connection.sendall(self._head(method, path, headers, body) + (body or b""))

    def _head(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> bytes:
        lines = [f"{method} {self._url.path}{path} HTTP/1.1", f"Host: {self._url.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [] if body is None else [f"Content-Length: {len(body)}"]
        if any("\r" in line or "\n" in line for line in lines):
            raise BadRequestError("An API key, a URL or a path contains a line break. Remove it.")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _take(self) -> socket.socket:
        with self._lock:
            _, connection = self._idle.pop() if self._idle else (0.0, None)
        if connection is not None and _was_closed(connection):
            connection.close()
            connection = None
        connection = connection or self._connect()
        with self._lock:
            self._used.append(connection)
        return connection

    def _give_back(self, connection: socket.socket, keep: bool) -> None:
        now, unused = time.monotonic(), []
        with self._lock:
            self._used.remove(connection)
            if keep and not self._closed:
                self._idle.append((now, connection))
            else:
                unused.append(connection)
            while self._idle and self._idle[0][0] < now - KEEP_ALIVE_EXPIRY:
                unused.append(self._idle.pop(0)[1])
        for each in unused:
            each.close()

    def _connect(self) -> socket.socket:
        default_port = 80 if self._tls is None else 443
        address = self._url.hostname or "", self._url.port or default_port
        try:
            connection = socket.create_connection(address, self._connect_timeout)
            for option in self._socket_options:
                connection.setsockopt(*option)
            return connection if self._tls is None else self._tls.wrap_socket(connection, server_hostname=address[0])
        except TimeoutError as error:  # TimeoutError would mean a server that is silent during a call
            raise ConnectionError(f"no connection within {self._connect_timeout} s") from error


def _read_plain(connection: socket.socket) -> tuple[Answer, bool] | None:
    """Read an answer in the form that verl-server sends: HTTP/1.1, with a length. Return (answer, True).

    True means that the connection stays open. For any other answer, return None and read nothing. `http.client` needs a
    quarter of a millisecond or more for each answer, because it parses the headers as an e-mail.
    """
    if isinstance(connection, ssl.SSLSocket):  # which cannot be looked into
        return None
    start = connection.recv(_PEEKED, socket.MSG_PEEK)
    head, end, _ = start.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    if not end or not status.startswith("HTTP/1.1 ") or whole_number(status[9:12]) is None or status[9:12] < "200":
        return None
    headers = Headers((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))
    length = whole_number(headers.get("content-length", ""), most_digits=20)
    unusual = headers.get("transfer-encoding") or headers.get("connection") or status[9:12] in ("204", "304")
    if unusual or length is None:
        return None
    left = len(head) + len(end) + length
    parts = []
    while left:
        data = connection.recv(min(left, _PEEKED))
        if not data:
            raise http.client.IncompleteRead(b"", left)
        parts.append(data)
        left -= len(data)
    return Answer(int(status[9:12]), headers, b"".join(parts)[len(head) + len(end) :]), True


def _read_any(connection: socket.socket, method: str) -> tuple[Answer, bool]:
    """Read an answer of any form. Return (answer, True if the connection stays open)."""
    with http.client.HTTPResponse(connection, method=method) as response:
        response.begin()
        answer = Answer(response.status, Headers(response.headers.items()), response.read())
        return answer, not response.will_close


def _parts(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Return the content of a response in parts as they arrive."""
    while data := response.read1(_PEEKED):
        yield data
    if response.length:  # `read1` does not raise it for a content with a length
        raise http.client.IncompleteRead(b"", response.length)


def _was_closed(connection: socket.socket) -> bool:
    """Return True if the server has closed an idle connection. Nothing else makes an idle connection readable."""
    idle = select.poll()
    idle.register(connection, select.POLLIN)
    return bool(idle.poll(0))
