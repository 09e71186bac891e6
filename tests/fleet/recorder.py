"""`Recorder`: passes connections on to a server, and keeps every request and answer as it was on the wire."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]


@dataclass
class Message:
    """A request or an answer."""

    line: bytes = b""
    """Method and target of a request, the status of an answer."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header; `name` is in lower case."""
        return next((value for each, value in self.headers if each.lower() == name), None)


class _Reader:
    """Takes the bytes of one direction of a connection, and makes messages of them. httptools calls it."""

    def __init__(self, kind: Any) -> None:
        self.whole: list[Message] = []
        self._parser = kind(self)
        self._is_request = kind is httptools.HttpRequestParser
        self._now = Message()
        self._target = b""

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._now, self._target = Message(), b""

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers.append((name, value))

    def on_body(self, part: bytes) -> None:
        self._now.body += part

    def on_message_complete(self) -> None:
        parser = self._parser
        self._now.line = (
            parser.get_method() + b" " + self._target if self._is_request else str(parser.get_status_code()).encode()
        )
        self.whole.append(self._now)


class Recorder:
    def __init__(self, server: str) -> None:
        """`server` is http://HOST:PORT."""
        self._server = urlsplit(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[tuple[_Reader, _Reader]] = []
        self._sockets: list[socket.socket] = []

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            for each in [self._listener, *self._sockets]:
                _end(each)
            thread.join(10)

    def exchange(self, line: bytes, name: bytes, value: bytes) -> tuple[Message, Message]:
        """Return the last request with this line and this header, and its answer."""
        found = [
            (request, answer)
            for requests, answers in self._connections
            for request, answer in zip(requests.whole, answers.whole, strict=False)
            if request.line == line and request.header(name) == value
        ]
        return found[-1]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._server.hostname, self._server.port))
            except OSError:
                return
            self._sockets += [client, server]
            requests, answers = _Reader(httptools.HttpRequestParser), _Reader(httptools.HttpResponseParser)
            self._connections.append((requests, answers))
            for source, target, reader in ((client, server, requests), (server, client, answers)):
                threading.Thread(target=_pass_on, args=(source, target, reader), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, reader: _Reader) -> None:
    """Note the bytes before they are sent, so that whoever has got an answer finds it here."""
    with suppress(OSError):
        while data := source.recv(65536):
            reader.feed(data)
            target.sendall(data)
    _end(target)


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
