"""`Journal`: the session store on disk. A thread writes, so the event loop never waits for the disk.

The ledger calls `put` for each record, and awaits `flushed`. The thread takes all waiting records, writes them in one
call and, if the policy requires it, syncs once for all of them. A write that fails is repeated every second, so the
order of records is kept, and no record is missing before a later record. Until a write succeeds, `failure` has the
reason, and the ledger refuses new turns.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from typing import Any, Literal

from verl_server.errors import SessionUnavailableError
from verl_server.server.sessions.journal_files import JournalFiles
from verl_server.server.sessions.records import CutRecord, DeleteRecord, Record, SessionRecord, frame, payload

logger = logging.getLogger(__name__)

FsyncPolicy = Literal["interval", "turn", "never"]
_INTERVAL = 1.0
"""Seconds between two syncs with the policy `interval`, and between two attempts to write after a failure."""
_ROTATE_BYTES = 256 * 2**20
_COMPACT_BYTES = 64 * 2**20
_BATCH = 1024
"""The most records of one write."""


class Journal:
    def __init__(
        self,
        files: JournalFiles,
        policy: FsyncPolicy,
        loop: asyncio.AbstractEventLoop,
        *,
        rotate_bytes: int = _ROTATE_BYTES,
        compact_bytes: int = _COMPACT_BYTES,
        interval: float = _INTERVAL,
    ) -> None:
        self.failure: str | None = None
        self._files, self._policy, self._loop = files, policy, loop
        self._rotate_bytes, self._compact_bytes, self._interval = rotate_bytes, compact_bytes, interval
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._given = self._durable = 0
        """Number of records that were put, and number of records that are durable by the policy."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._live: dict[str, int] = {}
        """Session without a parent -> bytes of its records, its children included."""
        self._dead = 0
        self._compaction: threading.Thread | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="session-journal", daemon=True)

    # -- the loop's side ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new file, and start the thread. Call this after the records of earlier runs were counted."""
        self._files.begin()
        self._thread.start()

    def count(self, record: Record, size: int) -> None:
        """Count the bytes of a record in the files as live or dead. Compaction depends on these counts."""
        if isinstance(record, CutRecord):
            return
        session = _session(record)
        if isinstance(record, DeleteRecord):
            self._dead += self._live.pop(session, 0) + size
        elif isinstance(record, SessionRecord) or session in self._live:
            self._live[session] = self._live.get(session, 0) + size
        else:
            self._dead += size

    def put(self, record: Record) -> None:
        """Queue a record, without waiting."""
        body = payload(record)
        self.count(record, len(body) + 8)
        self._given += 1
        self._queue.put((self._given, body))

    async def flushed(self) -> None:
        """Return when all records so far are durable by policy. Raise SessionUnavailableError if they are not."""
        if self.failure is not None:
            raise self._unavailable()
        if self._durable < self._given:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((self._given, future))
            await future

    @property
    def backlog(self) -> int:
        """Number of records that are not durable yet, by policy."""
        return self._given - self._durable

    @property
    def size(self) -> int:
        """Bytes of the records in the files, dead ones included until a compaction."""
        return sum(self._live.values()) + self._dead

    def close(self) -> None:
        """Write the waiting records, sync, and release the folder. Call this in any thread except the journal's."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        if self._compaction is not None:
            self._compaction.join(timeout=60)
        self._files.close()

    def _unavailable(self) -> SessionUnavailableError:
        return SessionUnavailableError(f"The session store cannot be written: {self.failure}. Retry later.")

    def _on_written(self, number: int) -> None:
        self.failure = None
        self._durable = number
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > number:
                self._waiting.append((wanted, future))
            elif not future.done():
                future.set_result(None)

    def _on_failure(self, reason: str) -> None:
        self.failure = reason
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(self._unavailable())

    # -- the thread's side ----------------------------------------------------------------------------------

    def _run(self) -> None:
        unsynced, last_sync = False, time.monotonic()
        while True:
            batch, ended = self._take(self._interval if unsynced else None)
            if batch:
                if not self._write(batch):
                    return
                unsynced = self._policy == "interval"
            if unsynced and (ended or time.monotonic() - last_sync >= self._interval):
                if not self._sync():
                    return
                unsynced, last_sync = False, time.monotonic()
            if ended:
                return
            self._tidy()

    def _take(self, timeout: float | None) -> tuple[list[tuple[int, bytes]], bool]:
        """Wait for records. Return (waiting records, at most `_BATCH`; True if `close` was called after them)."""
        batch: list[tuple[int, bytes]] = []
        try:
            item = self._queue.get(timeout=timeout)
            while item is not None:
                batch.append(item)
                if len(batch) >= _BATCH:
                    return batch, False
                item = self._queue.get_nowait()
            return batch, True
        except queue.Empty:
            return batch, False

    def _write(self, batch: list[tuple[int, bytes]]) -> bool:
        """Write a batch, and try again until the write succeeds.

        Return False if the journal closes before the write succeeds, or if a sync failed.
        """
        data = b"".join(piece for _, body in batch for piece in (frame(body), body))
        while True:
            try:
                self._files.append(data)
                break
            except OSError as error:
                logger.error("The session store cannot be written: %s. It is tried again.", error)
                self._post(self._on_failure, str(error))
                if self._closing.wait(self._interval):
                    return False
        if self._policy == "turn" and not self._sync():
            return False
        self._post(self._on_written, batch[-1][0])
        return True

    def _sync(self) -> bool:
        """Sync the file.

        After a failure nothing more is written, because the system may have dropped unwritten data.
        """
        try:
            self._files.sync()
        except OSError as error:
            logger.error("The session store cannot be synced: %s. Sessions are refused until a restart.", error)
            self._post(self._on_failure, f"{error} (fdatasync). Start the server again")
            return False
        return True

    def _tidy(self) -> None:
        """Rotate a long file. Begin a compaction if more than half of the store is dead."""
        try:
            running = self._compaction is not None and self._compaction.is_alive()
            live = sum(self._live.copy().values())
            if not running and self._dead >= self._compact_bytes and self._dead > live:
                self._files.rotate()
                number, kept = self._files.number, set(self._live.copy())
                self._dead = 0
                self._compaction = threading.Thread(
                    target=self._compact, args=(number, kept), name="session-compaction", daemon=True
                )
                self._compaction.start()
            elif self._files.size >= self._rotate_bytes:
                self._files.rotate()
        except OSError as error:
            logger.error("The session store cannot begin another file: %s.", error)

    def _compact(self, number: int, kept: set[str]) -> None:
        began = time.monotonic()
        try:
            size = self._files.compact(number, lambda record: _session(record) in kept)
            logger.info("The session store was compacted to %d bytes in %.1f s.", size, time.monotonic() - began)
        except Exception:
            logger.exception("The session store could not be compacted.")

    def _post(self, function: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            logger.debug("The event loop ended before the session journal.")


def _session(record: Any) -> str:
    """Return the session without a parent that a record belongs to."""
    named: str = record.id if isinstance(record, SessionRecord) else record.session
    return named.partition(".")[0]
