"""`GuardedProtocol`: uvicorn's HTTP protocol with bounds on the data that arrives before the application runs.

uvicorn with httptools collects a request's head, its trailers and its chunk extensions without a bound, and a client
may take as long as it likes for them. Here each part of a request has a bound in bytes, and a head has one in seconds.
Bodies are bounded by the applications, which know how large a body may be. `Acceptor` asks `is_idle` when there is no
room for another connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024
"""Most bytes of the request line and the headers, and of the trailers or the extensions of a chunk."""
MOST_HEADERS = 256
"""Most headers and trailers of a request."""
HEAD_SECONDS = 20.0
"""Longest time from a connection, or from the first byte of a further request, until the headers are complete."""


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending = 0  # bytes since the last part of a request was complete
        self._head_bytes = self._headers_seen = 0
        self._in_head = self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        """Time of the event loop at which the connection began to wait for a request."""

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered and no complete head of a request has arrived."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        # A part that is complete has reset `_pending`. What one read brings is in memory already.
        if (self._is_refused or self._pending - len(data) > MOST_HEAD_BYTES) and not self.transport.is_closing():
            what = f"has more than {MOST_HEAD_BYTES} bytes of headers, or more than {MOST_HEADERS} headers"
            self._refuse(b"431 Request Header Fields Too Large", what)

    # -- the parser's events ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._head_bytes = self._headers_seen = 0
        self._in_head = True
        if self._timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._headers_seen += 1
        if self._headers_seen > MOST_HEADERS or self._head_bytes > MOST_HEAD_BYTES:
            self._is_refused = True  # from here on, no application sees a part of the request
        if not self._is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._pending, self._in_head = 0, False
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    # -- bounds -------------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(b"408 Request Timeout", f"took more than {HEAD_SECONDS:g} s for its headers")
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: bytes, what: str) -> None:
        """Send an answer unless another answer is being sent, and close the connection."""
        text = f"The request {what}.".encode()
        if not self.transport.is_closing() and self.is_idle:
            head = b"HTTP/1.1 " + status + b"\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: "
            self.transport.write(head + str(len(text)).encode() + b"\r\n\r\n" + text)
        self.transport.close()
