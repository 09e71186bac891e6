"""`AnswerLog`: the answer to one request, as the application sent it, for any number of readers.

`ReplayMiddleware` lets the application write to a log instead of the client's connection. Each connection of a client
reads the log from its own position. A slow reader delays neither the application nor other readers. `Entries` packs the
log of a kept answer: a packed log has few objects, for any number of pieces.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from typing import Any

import msgspec

Message = dict[str, Any]

_EVENTS = b"text/event-stream"
_DONE = b"data: [DONE]"
_MOST_READ = 256 * 1024
"""Number of bytes after which `read` adds no further piece."""


class AnswerLog:
    """The start of an answer, and the pieces of its body. A piece of an event stream is one event."""

    __slots__ = (
        "_body",
        "_changed",
        "_ends",
        "_numbers_events",
        "_packed_start",
        "_pieces",
        "_start",
        "_supersedes",
        "is_broken",
        "is_complete",
        "is_stream",
        "size",
        "status",
    )

    def __init__(self, *, numbers_events: bool, supersedes: bool) -> None:
        """With `numbers_events`, each event gets an `id`. With `supersedes`, an event replaces the events before it."""
        self._numbers_events, self._supersedes = numbers_events, supersedes
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._packed_start = b""  # of a packed log, instead of `_start`: msgpack of (status, headers)
        self._body = b""  # of a packed log, instead of `_pieces`: all pieces
        self._ends = array("I")  # of a packed log: the end of each piece in `_body`
        self._changed: asyncio.Event | None = None
        self.status = 0
        """HTTP status of the answer. 0 before the start."""
        self.is_stream = False
        """True for an event stream."""
        self.size = 0
        """Bytes of the pieces."""
        self.is_complete = False
        """True when the application has sent the whole answer, or has ended early."""
        self.is_broken = False
        """True if the application ended before the end of its answer."""

    @property
    def start(self) -> Message | None:
        """The message that begins the answer. None until the application has sent it."""
        if not self._packed_start:
            return self._start
        status, headers = msgspec.msgpack.decode(self._packed_start, type=tuple[int, list[tuple[bytes, bytes]]])
        return {"type": "http.response.start", "status": status, "headers": headers}

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self._ends) or len(self._pieces)

    def send(self, message: Message) -> None:
        """Append a message of the application."""
        if message["type"] == "http.response.start":
            self._start, self.status = message, int(message["status"])
            self.is_stream = any(
                name.lower() == b"content-type" and value.startswith(_EVENTS)
                for name, value in message.get("headers", [])
            )
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                self._append(bytes(body))
            self.is_complete = not message.get("more_body", False)
        self._wake()

    def end(self) -> None:
        """Record that the application has ended. An answer without an end is broken."""
        if not self.is_complete:
            self.is_complete = self.is_broken = True
            self._wake()

    def read(self, place: int) -> tuple[bytes, int]:
        """Return the bytes from piece `place` on, up to about 256 KiB, and the number of the next piece."""
        if self._ends:
            begin = self._ends[place - 1] if place else 0
            end = max(bisect_right(self._ends, begin + _MOST_READ), place + 1)
            return self._body[begin : self._ends[end - 1]], end
        end, size = place, 0
        while end < len(self._pieces) and size < _MOST_READ:
            size += len(self._pieces[end])
            end += 1
        return b"".join(self._pieces[place:end]), end

    def pack(self) -> int:
        """Store a complete answer in three buffers, and return their size in bytes. Readers keep their positions."""
        assert self.is_complete and self._start is not None
        headers = [(bytes(name), bytes(value)) for name, value in self._start.get("headers", [])]
        self._packed_start = msgspec.msgpack.encode((self.status, headers))
        end = 0
        for piece in self._pieces:
            end += len(piece)
            self._ends.append(end)
        # A copy: encoders return bytes that keep the memory of a larger buffer, and a join of one piece is this piece.
        self._body = bytes(bytearray().join(self._pieces))
        self._start, self._pieces = None, []
        return len(self._packed_start) + len(self._body) + self._ends.itemsize * len(self._ends)

    def next_change(self) -> asyncio.Event:
        """Return the event that is set by the next message, or by the end of the answer."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def _append(self, body: bytes) -> None:
        if not self.is_stream:
            self._add(body)
            return
        for event in body.split(b"\n\n"):
            if not event:
                continue
            if self._supersedes and self._pieces and not event.startswith(_DONE):
                self.size -= len(self._pieces[-1])
                self._pieces[-1] = b""
            number = b"id: %d\n" % (len(self._pieces) + 1) if self._numbers_events else b""
            self._add(number + event + b"\n\n")

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.size += len(piece)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
