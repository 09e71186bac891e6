"""`SessionLedger`: the owner's side of all sessions of one server: create, reward, finish, delete and expire them.

It runs on the TokenizerManager's event loop, and no method blocks it. Every change is a record. The ledger applies the
record to its table and passes the record to the store, which may write it to disk. `TurnLedger` adds the turns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from verl_server.errors import BadRequestError, SessionExistsError, SessionUnavailableError
from verl_server.messages.session_types import CreateSession, RewardBody, SessionState
from verl_server.server.metrics import Metrics
from verl_server.server.sessions.limits import Bounds, check_new, check_reward, check_text
from verl_server.server.sessions.records import DeleteRecord, FinishRecord, Record, RewardRecord, SessionRecord
from verl_server.server.sessions.session import Session
from verl_server.server.sessions.table import SessionTable, hash_of_key
from verl_server.server.slices import Slices
from verl_server.version_demand import read_demand
from verl_server.web.session_keys import KEY_PREFIX

logger = logging.getLogger(__name__)

_MOST_FREED = 256
"""Number of sessions that are deleted in one step to make room. A step takes a few milliseconds."""
_UNREAD_RETENTION = 24 * 3600.0
"""Seconds that a finished session is kept if its trajectory was never read."""


class Store(Protocol):
    """Receives every record of the ledger, in order. `journal.Journal` writes the records to disk."""

    @property
    def failure(self) -> str | None:
        """The reason why nothing can be written now, or None if the store works."""
        ...

    def put(self, record: Record) -> None:
        """Queue a record, without waiting."""
        ...

    async def flushed(self) -> None:
        """Return when all records so far are durable by policy. Raise SessionUnavailableError if they are not."""
        ...


class MemoryStore:
    """The store of a server without `session_store`. It drops the records."""

    failure: str | None = None

    def put(self, record: Record) -> None:
        pass

    async def flushed(self) -> None:
        pass


class SessionLedger:
    def __init__(
        self,
        bounds: Bounds | None = None,
        *,
        gate: Callable[[], str | None] = lambda: None,
        store: Store | None = None,
        counters: Metrics | None = None,
        clock: Callable[[], float] = time.time,
        on_end: Callable[[str], None] = lambda session_id: None,
    ) -> None:
        """`gate` returns the reason why sessions cannot continue now, or None.

        `on_end` is called with the id of each session and child session that ends or is deleted.
        """
        self._on_end = on_end
        self.bounds = bounds or Bounds()
        self._gate = gate
        self.store: Store = store or MemoryStore()
        self.table = SessionTable()
        self.counters = counters
        self.clock = clock

    def create(self, body: CreateSession) -> tuple[Session, str]:
        """Return a new session and its key. Raise BadRequestError, SessionExistsError or SessionUnavailableError."""
        self.check_open()
        if len(self.table) >= self.bounds.max_sessions:
            self._free()
        if len(self.table) >= self.bounds.max_sessions:
            raise SessionUnavailableError(
                f"The server has its {self.bounds.max_sessions} sessions (max_sessions). Finish or delete some."
            )
        self.check_memory()
        check_new(body)
        session_id = f"ses_{secrets.token_hex(8)}" if body.id is None else body.id
        if session_id in self.table:
            raise SessionExistsError(f"Session {session_id} exists already. Delete it, or choose another id.")
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        self.record(
            SessionRecord(
                id=session_id,
                key_hash=hash_of_key(key),
                created=self.clock(),
                group=body.group,
                metadata=body.metadata,
                limits=body.limits,
                history=body.history,
                sampling=body.sampling_params,
                forced=body.forced_sampling_params,
                forced_mode=body.forced_mode,
                seed=body.seed,
                streaming=body.streaming,
                weight_demand=read_demand(body.min_weight_version, body.exact_weight_version),
            )
        )
        if self.counters is not None:
            self.counters.session_created()
        return self.table.find(session_id), key

    def reward(self, session_id: str, body: RewardBody) -> float | None:
        """Record a reward and return `Session.reward`. Raise SessionNotFoundError or BadRequestError."""
        session = self.table.find(session_id)
        check_reward(session, body)
        self.record(RewardRecord(session_id, body.reward, body.turn, body.name))
        return session.reward

    def finish(self, session_id: str, reason: str = "done", state: SessionState = "finished") -> Session:
        """End a session: its key ends, and its running turns are aborted and recorded. Idempotent."""
        session = self.table.find(session_id).root
        check_text("reason", reason)
        if session.state == "open":
            self.record(FinishRecord(session.id, state, reason, self.clock()))
            if self.counters is not None:
                self.counters.session_ended(state)
            self._abort(session)
        return session

    def read(self, session: Session) -> None:
        """Record that the trajectory of a session was read."""
        session.fetched = session.root.state != "open"
        if session.fetched and session.owner is None:
            self.table.read_after_end[session.id] = None

    def delete(self, session_id: str) -> None:
        """Delete a session and its children. Raise SessionNotFoundError if there is no such session."""
        session = self.table.find(session_id)
        if session.owner is not None:
            raise BadRequestError(f"Session {session_id} is a child. Delete its parent {session.owner.id}.")
        if session.state == "open" and self.counters is not None:
            self.counters.session_ended("deleted")
        self._abort(session)
        self.record(DeleteRecord(session_id))

    def _abort(self, session: Session) -> None:
        """Abort the running turns of a session that ends and of its children, and report the end of each of them."""
        for each in self.table.family(session):
            for pending in list(each.pending.values()):
                if pending.abort is not None:
                    pending.abort()
            self._on_end(each.id)

    async def settled(self, session: Session, timeout: float = 5.0) -> None:
        """Return when no turn of an ended session runs any more, or after `timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while session.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    # -- records --------------------------------------------------------------------------------------------

    def record(self, record: Record) -> None:
        """Apply a record, and pass it to the store."""
        self.table.apply(record)
        self.store.put(record)

    def restored(self) -> None:
        """Record that all records of an earlier run were applied. Turns without an end count as interrupted."""
        for session in self.table.roots():
            session.started = sum(turn is not None for each in self.table.family(session) for turn in each.turns)
            session.active = self.clock() if session.state == "open" else session.active

    # -- bounds ---------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise SessionUnavailableError if nothing can be generated or stored in sessions now."""
        if (reason := self._gate()) is not None:
            raise SessionUnavailableError(reason)
        if self.store.failure is not None:
            raise SessionUnavailableError(f"The session store cannot be written: {self.store.failure}. Retry later.")

    def check_memory(self) -> None:
        if self.table.memory >= self.bounds.memory_bytes:
            self._free()
        if self.table.memory >= self.bounds.memory_bytes:
            raise SessionUnavailableError(
                f"The sessions of this server use {self.table.memory} bytes "
                f"(session_memory_bytes={self.bounds.memory_bytes}). Finish and delete some."
            )

    async def sweep(self) -> None:
        """Expire the sessions that are open too long, and delete those that ended long ago. Work in slices."""
        now, slices = self.clock(), Slices()
        for session in self.table.all():
            await slices.end()
            if session.owner is not None or self.table.get(session.id) is not session:
                continue
            limits = session.limits
            idle = now - session.active
            if session.state != "open":
                kept = self.bounds.retention if session.fetched else max(self.bounds.retention, _UNREAD_RETENTION)
                if now - session.ended > kept and not session.in_flight:
                    self.delete(session.id)
            elif limits.seconds is not None and now - session.record.created > limits.seconds:
                self.finish(session.id, "seconds", "expired")
            elif not session.in_flight and limits.idle_seconds is not None and idle > limits.idle_seconds:
                self.finish(session.id, "idle_seconds", "expired")
            elif not session.in_flight and idle > self.bounds.ttl:
                self.finish(session.id, "session_ttl", "expired")

    async def run(self) -> None:
        """Sweep every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.sweep()
            except Exception:
                logger.exception("Sessions could not be swept.")

    def _free(self) -> None:
        """Delete up to `_MOST_FREED` sessions that ended and were read, until one tenth of the memory is free."""
        target = self.bounds.memory_bytes * 9 // 10
        for session_id in list(islice(self.table.read_after_end, _MOST_FREED)):
            if self.table.memory <= target and len(self.table) < self.bounds.max_sessions:
                return
            if not self.table.find(session_id).in_flight:
                self.delete(session_id)
