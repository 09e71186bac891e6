"""`Entries`: the requests that a retry may join, or whose answer is kept, by key, within bounds of time and memory.

`ReplayMiddleware` owns it, and uses it on the event loop only. No method visits all entries: the kept answers are in
the order in which they expire, and their bytes are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from verl_server.server.replay.answer_log import AnswerLog

Scope = bytes
"""16 bytes: a hash of the caller's key, the session and the child session.

Idempotency keys are compared within one scope only.
"""

_KEPT_BYTES = 900
"""Bytes of a kept answer in addition to its buffers: the entry, its log, the keys and their places in the tables."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request and its answer. The routes find it as `scope["state"]["replay"]`."""

    scope: Scope
    key: bytes | None
    """16 bytes: a hash of the idempotency key."""
    digest: bytes
    """Hash of the path, the headers that change the answer, and the body."""
    log: AnswerLog
    abandoned: asyncio.Event | None
    """Event that is set when no connection waits any more. The application then sees that its client disconnected.

    None after the application has ended.
    """
    readers: int = 0
    is_lost: bool = False
    """True if a connection was lost before its reply was complete, and no retry has joined since."""
    lost: asyncio.Event | None = None
    """Event that is set when `is_lost` becomes true. None if no task waits for it."""
    timer: asyncio.TimerHandle | None = None
    """Timer that runs while the application runs and no connection reads."""
    on_delivered: Callable[[], None] | None = None
    """A function that the routes set. It is called when the first connection has received the whole answer."""
    is_dropped: bool = False
    is_too_large: bool = False
    """True if the answer is complete, but was dropped because it has too many bytes."""
    expires: float = 0.0
    """Time of the loop until which the complete answer is kept."""
    size: int = 0
    """Approximate bytes of memory of the complete answer."""

    def delivered(self) -> None:
        """Record that a connection has received the whole answer."""
        call, self.on_delivered = self.on_delivered, None
        if call is not None:
            call()


class Entries:
    """All entries of one server."""

    def __init__(self, grace: float, ttl: float, most_bytes: int, most_entry_bytes: int) -> None:
        self._grace, self._ttl, self._most_bytes, self._most_entry_bytes = grace, ttl, most_bytes, most_entry_bytes
        self._running: set[Entry] = set()
        self._kept: dict[Entry, None] = {}  # complete answers, the first to expire first
        self._by_key: dict[bytes, Entry] = {}  # by scope and key
        self._live: dict[bytes, dict[Entry, None]] = {}  # by scope and digest: entries that run, are read, or are lost
        self._timer: asyncio.TimerHandle | None = None  # set for the first kept answer to expire
        self.size = 0
        """Approximate bytes of memory of the kept answers."""

    def __len__(self) -> int:
        return len(self._running) + len(self._kept)

    def add(self, entry: Entry) -> None:
        self._running.add(entry)
        if entry.key is not None:
            if (before := self.find(entry.scope, entry.key)) is not None:
                self.drop(before)
            self._by_key[entry.scope + entry.key] = entry
        self._live.setdefault(entry.scope + entry.digest, {})[entry] = None

    def find(self, scope: Scope, key: bytes) -> Entry | None:
        return self._by_key.get(scope + key)

    async def lost(self, scope: Scope, digest: bytes, seconds: float) -> Entry | None:
        """Return the only entry of a request whose connection was lost and which no connection reads, or None.

        If the request has one entry, wait up to `seconds` for the loss of its connection.
        """
        same = self._live.get(scope + digest, {})
        if len(same) == 1 and not (only := next(iter(same))).is_lost:
            only.lost = only.lost or asyncio.Event()
            try:
                await asyncio.wait_for(only.lost.wait(), seconds)
            except TimeoutError:
                return None
        found: Entry | None = None
        for entry in self._live.get(scope + digest, ()):
            if entry.is_lost and not entry.readers:
                if found is not None:
                    return None
                found = entry
        return None if found is None or self.is_too_large(found) else found

    def joined(self, entry: Entry) -> None:
        """Record that a connection reads the entry."""
        entry.readers += 1
        entry.is_lost = False
        self._cancel(entry)
        if not entry.is_dropped:
            self._live.setdefault(entry.scope + entry.digest, {})[entry] = None

    def left(self, entry: Entry, *, complete: bool) -> None:
        """Record that a connection has ended.

        If it was the last connection and missed a part, the entry waits for a retry.
        """
        entry.readers -= 1
        if not complete:
            entry.is_lost = True
            if entry.lost is not None:
                entry.lost.set()
                entry.lost = None
        if entry.readers or entry.is_dropped:
            return
        if entry.abandoned is not None and not entry.log.is_complete:
            entry.timer = asyncio.get_running_loop().call_later(self._grace, entry.abandoned.set)
        elif not entry.is_lost:
            self._settle(entry)

    def ended(self, entry: Entry) -> None:
        """Record that the application has ended. A refusal, or an answer without an end, is not kept for a retry."""
        is_kept = not entry.log.is_broken and 200 <= entry.log.status < 300
        if not is_kept or (entry.key is None and not entry.is_lost and not entry.readers):
            self.drop(entry)
            return
        self._cancel(entry)
        entry.abandoned = None
        if entry.log.size > self._most_entry_bytes:
            entry.is_too_large = True
            entry.log = _mark(entry.log)
        entry.size = _KEPT_BYTES + entry.log.pack()
        entry.expires = asyncio.get_running_loop().time() + self._ttl
        self._running.discard(entry)
        self._kept[entry] = None
        self.size += entry.size
        if not entry.readers and not entry.is_lost:
            self._settle(entry)
        while self.size > self._most_bytes and self._kept:
            self.drop(next(iter(self._kept)))
        if self._timer is None:
            self._expire()

    def is_too_large(self, entry: Entry) -> bool:
        """Return True if the answer is not kept because of its size."""
        return entry.is_too_large or entry.log.size > self._most_entry_bytes

    def drop(self, entry: Entry) -> None:
        """Remove an entry. Connections that read its log continue to read it."""
        if entry.is_dropped:
            return
        entry.is_dropped = True
        self._cancel(entry)
        self._running.discard(entry)
        if entry in self._kept:
            del self._kept[entry]
            self.size -= entry.size
        if entry.key is not None:
            self._by_key.pop(entry.scope + entry.key, None)
        self._rest(entry)

    def _settle(self, entry: Entry) -> None:
        """Keep an answer that was received in full and that nobody reads, if it has a key. Otherwise drop it."""
        if entry.key is None:
            self.drop(entry)
        else:
            self._rest(entry)

    def _rest(self, entry: Entry) -> None:
        """Remove an entry from the tables of running, read and lost entries."""
        same = self._live.get(entry.scope + entry.digest)
        if same is not None:
            same.pop(entry, None)
            if not same:
                del self._live[entry.scope + entry.digest]

    def _expire(self) -> None:
        """Drop the answers that have expired, and set the timer for the next expiry."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._kept:
            first = next(iter(self._kept))
            if first.expires > loop.time():
                self._timer = loop.call_at(first.expires, self._expire)
                return
            self.drop(first)

    @staticmethod
    def _cancel(entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None


def _mark(log: AnswerLog) -> AnswerLog:
    """Return the log of a complete answer that has the start of `log`'s answer and an empty body."""
    mark = AnswerLog(numbers_events=False, supersedes=False)
    mark.send(log.start or {"type": "http.response.start", "status": log.status})
    mark.send({"type": "http.response.body"})
    return mark
