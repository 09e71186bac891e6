"""Control calls over plain, kept HTTP connections: a push is one small request, so the client must cost little.

Used by `http_engine` for everything but generation. A call takes an idle connection or makes one, so calls of
several threads run beside each other. Nothing is sent twice. (httpx takes three times as long for such a request,
half a millisecond or more.)
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

_IDLE = 8
"""Connections that are kept for later calls."""


@dataclass(frozen=True)
class Answer:
    """An HTTP response, read to its end."""

    status_code: int
    headers: http.client.HTTPMessage
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


class ControlConnections:
    """Connections to one server. Thread-safe."""

    def __init__(self, url: str, connect_timeout: float, socket_options: Iterable[tuple[int, int, int]]) -> None:
        self._url = urlsplit(url)
        self._connect_timeout = connect_timeout
        self._socket_options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), *socket_options]
        self._tls: ssl.SSLContext | None = httpx.create_ssl_context() if self._url.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._used: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float | None
    ) -> Answer:
        """One request and its answer. `timeout` bounds each wait for the server, in seconds.

        Raises TimeoutError when the server is silent, ConnectionRefusedError and the like when it cannot be reached,
        OSError or http.client.HTTPException when the connection breaks.
        """
        connection = self._take()
        try:
            if connection.sock is None:
                self._connect(connection)
            connection.sock.settimeout(timeout)
            connection.request(method, self._url.path + path, body, headers)
            response = connection.getresponse()
            answer = Answer(response.status, response.headers, response.read())
        except BaseException:
            connection.close()
            raise
        finally:
            self._give_back(connection)
        return answer

    def close(self) -> None:
        """Close all; calls that wait for an answer end with an error."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        for connection in idle:
            connection.close()

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else self._new()
            self._used.append(connection)
        if connection.sock is not None and _was_closed(connection):
            connection.close()  # `request` connects it again
        return connection

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._used.remove(connection)
            keep = connection.sock is not None and not self._closed and len(self._idle) < _IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=self._connect_timeout, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._connect_timeout)

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except TimeoutError as error:  # not a server that is silent during a call
            raise ConnectionError(f"no connection within {self._connect_timeout} s") from error
        for option in self._socket_options:
            connection.sock.setsockopt(*option)


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed an idle connection: nothing else makes it readable."""
    idle = select.poll()
    idle.register(connection.sock, select.POLLIN)
    return bool(idle.poll(0))
