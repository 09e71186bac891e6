"""`AnswerLog`: the answer to one request, as the application sent it, for any number of readers.

`ReplayMiddleware` runs the application against a log in place of the client's connection. Each connection of a client
reads the log from its own place on. A reader that does not read holds back nobody.
"""

from __future__ import annotations

import asyncio
from typing import Any

Message = dict[str, Any]

_EVENTS = b"text/event-stream"
_DONE = b"data: [DONE]"


class AnswerLog:
    """The start of an answer, and the pieces of its body. A piece of an event stream is one event."""

    def __init__(self, *, numbers_events: bool, supersedes: bool) -> None:
        """`numbers_events`: each event gets an `id`. `supersedes`: an event replaces the events before it."""
        self._numbers_events, self._supersedes = numbers_events, supersedes
        self.start: Message | None = None
        self.pieces: list[bytes] = []
        self.size = 0
        """Bytes of the pieces."""
        self.is_complete = False
        """True when the application has sent everything, or has ended without that."""
        self.is_broken = False
        """True if the application ended before the end of its answer."""
        self._changed = asyncio.Event()

    @property
    def status(self) -> int:
        return 0 if self.start is None else int(self.start["status"])

    @property
    def is_stream(self) -> bool:
        """True for an event stream."""
        headers = [] if self.start is None else self.start.get("headers", [])
        return any(name.lower() == b"content-type" and value.startswith(_EVENTS) for name, value in headers)

    def send(self, message: Message) -> None:
        """Append a message of the application."""
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                self._append(bytes(body))
            self.is_complete = not message.get("more_body", False)
        self._wake()

    def end(self) -> None:
        """The application has ended. An answer without an end is broken."""
        if not self.is_complete:
            self.is_complete = self.is_broken = True
            self._wake()

    def next_change(self) -> asyncio.Event:
        """Return the event that the next message, or the end, sets."""
        return self._changed

    def _append(self, body: bytes) -> None:
        if not self.is_stream:
            self._add(body)
            return
        for event in body.split(b"\n\n"):
            if not event:
                continue
            if self._supersedes and self.pieces and not event.startswith(_DONE):
                self.size -= len(self.pieces[-1])
                self.pieces[-1] = b""
            number = b"id: %d\n" % (len(self.pieces) + 1) if self._numbers_events else b""
            self._add(number + event + b"\n\n")

    def _add(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
