"""`Entries`: the requests that may be joined or answered again, by their keys, within bounds of time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from verl_server.server.replay.answer_log import AnswerLog

Scope = tuple[bytes, str, str]
"""Hash of the caller's key, the session, and the child session. Keys of different scopes never meet."""


@dataclass
class Entry:
    """One request and its answer."""

    scope: Scope
    key: bytes | None
    digest: bytes
    """Hash of the path, the headers that change the answer, and the body."""
    log: AnswerLog
    readers: int = 0
    is_lost: bool = False
    """A connection was lost before its reply was complete, and no retry has joined since."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `is_lost` becomes true."""
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nobody waits any more: the application sees that its client disconnected."""
    timer: asyncio.TimerHandle | None = None
    on_delivered: Callable[[], None] | None = None
    """Called when a connection took the whole answer."""
    is_dropped: bool = False


class Entries:
    """All entries of one server. Used on the event loop only."""

    def __init__(self, grace: float, ttl: float, most_bytes: int, most_entry_bytes: int) -> None:
        self._grace, self._ttl, self._most_bytes, self._most_entry_bytes = grace, ttl, most_bytes, most_entry_bytes
        self._entries: dict[int, Entry] = {}  # in the order of arrival
        self._by_key: dict[tuple[Scope, bytes], Entry] = {}
        self._by_digest: dict[tuple[Scope, bytes], list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        self._entries[id(entry)] = entry
        if entry.key is not None:
            self._by_key[entry.scope, entry.key] = entry
        self._by_digest.setdefault((entry.scope, entry.digest), []).append(entry)

    def find(self, scope: Scope, key: bytes) -> Entry | None:
        return self._by_key.get((scope, key))

    def same(self, scope: Scope, digest: bytes) -> list[Entry]:
        """Return the entries of one scope whose request was the same."""
        return list(self._by_digest.get((scope, digest), ()))

    def joined(self, entry: Entry) -> None:
        """A connection reads the entry."""
        entry.readers += 1
        entry.is_lost = False
        entry.lost.clear()
        self._cancel(entry)

    def left(self, entry: Entry, *, complete: bool) -> None:
        """A connection has ended. If it was the last one and took too little, the entry waits for a retry."""
        entry.readers -= 1
        if not complete:
            entry.is_lost = True
            entry.lost.set()
        if entry.readers or entry.is_dropped:
            return
        if not entry.log.is_complete:
            self._later(entry, self._grace, entry.abandoned.set)
        elif entry.key is None and not entry.is_lost:
            self.drop(entry)

    def ended(self, entry: Entry) -> None:
        """The application has ended. A refusal, or an answer without an end, is not kept: a retry is judged anew."""
        is_kept = not entry.log.is_broken and 200 <= entry.log.status < 300
        if not is_kept or (entry.key is None and not entry.is_lost and not entry.readers):
            self.drop(entry)
            return
        self._later(entry, self._ttl, lambda: self.drop(entry))
        self._make_room()

    def is_too_large(self, entry: Entry) -> bool:
        """Return True if the answer is not kept because of its size."""
        return entry.log.size > self._most_entry_bytes

    def drop(self, entry: Entry) -> None:
        """Forget an entry. Connections that read its log read on."""
        entry.is_dropped = True
        self._cancel(entry)
        if self._entries.pop(id(entry), None) is None:
            return
        if entry.key is not None:
            self._by_key.pop((entry.scope, entry.key), None)
        same = self._by_digest[entry.scope, entry.digest]
        same.remove(entry)
        if not same:
            del self._by_digest[entry.scope, entry.digest]

    def _make_room(self) -> None:
        size = sum(each.log.size for each in self._complete())
        for each in list(self._complete()):
            if size <= self._most_bytes:
                return
            size -= each.log.size
            self.drop(each)

    def _complete(self) -> Iterator[Entry]:
        return (each for each in self._entries.values() if each.log.is_complete)

    def _later(self, entry: Entry, seconds: float, call: Callable[[], None]) -> None:
        self._cancel(entry)
        entry.timer = asyncio.get_running_loop().call_later(seconds, call)

    @staticmethod
    def _cancel(entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
