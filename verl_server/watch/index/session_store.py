"""`SessionStore`: the sessions in a server's store, read while the server may write it.

The page's server asks it, from any thread. The store is only read: no lock, no mode and no byte changes. `poll` reads
the records that were appended since the last call, and begins again when a snapshot has replaced the journals. Of a
turn only its figures and its place are kept; its tokens are read when they are asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_server.errors import SessionNotFoundError
from verl_server.files.run_output import is_claimed
from verl_server.messages.session_types import Branch, BranchKind, SessionState
from verl_server.rollout.trajectory import Trajectory
from verl_server.watch.index.store_frames import LOCK, FrameTail, current_size
from verl_server.watch.index.store_table import SessionEntry, StoreTable
from verl_server.watch.index.stored_session import StoredSession, read_stored, stop_reason

SessionOrder = Literal["newest", "oldest", "reward", "-reward", "tokens", "-tokens", "turns", "-turns"]
"""Orders of sessions. With "-", the largest is the first. Sessions without a reward are the last ones."""


class SessionRow(msgspec.Struct, kw_only=True):
    """One session. Times are wall times in seconds since 1970."""

    session: str
    parent: str
    """Id of the session whose sub-agent has this one. "" if it is no sub-agent's."""
    children: list[str]
    group: str
    state: SessionState
    reason: str
    """Why the session has ended. "" while it is open."""
    created: float
    active: float
    """End of the last turn; `created` if there is none."""
    ended: float | None
    turns: int
    """Finished turns, without those of sub-agents."""
    running: int
    """Turns that began and have no end: they are generated, or were cancelled or interrupted."""
    tokens: int
    """Tokens of the longest turn, its prompt included."""
    sampled: int
    """Sampled tokens, without those of sub-agents."""
    reward: float | None
    """Sum of the rewards of the whole session; None if there is none."""
    generate_seconds: float
    """Sum of the times of the turns."""
    oldest_version: str
    newest_version: str


class SessionPage(msgspec.Struct, kw_only=True):
    rows: list[SessionRow]
    after: int | None
    """The argument `after` of the next page; None if this is the last one."""
    total: int


class StoredBranch(msgspec.Struct, kw_only=True):
    """A branch of a session without its tokens."""

    branch: int
    kind: BranchKind
    fork_of: int | None
    """Branch that this one departs from. None: it begins a conversation, or it is unknown."""
    shared: int
    """Tokens that this branch has in common with an earlier one."""
    turns: list[int]
    tokens: int
    sampled: int


class SessionStore:
    def __init__(self, folder: Path) -> None:
        """`folder` is the one of `--session-store`. Nothing is read before `poll`."""
        self.folder = folder
        self.generation = 0
        """Grows when a call of `poll` found something new."""
        self._polling = threading.Lock()
        self._lock = threading.Lock()
        """Held while one of the next two is replaced or grows, but not for longer than a piece of a file."""
        self._frames, self._table = FrameTail(folder), StoreTable()
        self._next: tuple[FrameTail, StoreTable] | None = None
        """What is read of a store that was compacted, until all of it is."""
        self._state: Literal["running", "ended", "unknown"] = "unknown"

    def poll(self, seconds: float = 1.0) -> bool:
        """Read new records for about `seconds`. Return True if something was new.

        A fault of a file becomes a warning, never an exception. If `progress` says that bytes are left, the next call
        goes on.
        """
        with self._polling:
            until = time.monotonic() + seconds
            newest = self._next or (self._frames, self._table)
            if newest[0].is_replaced():
                newest = self._next = FrameTail(self.folder), StoreTable()
            frames, table = newest
            before = frames.progress[0]
            has_more = frames.read(self._locked(table), until)
            has_changed = frames.progress[0] != before
            if self._next is not None and not has_more:
                with self._lock:
                    (self._frames, self._table), self._next = self._next, None
                has_changed = True
            state = self._state_now()
            has_changed |= state != self._state
            self._state = state
            self.generation += has_changed
            return has_changed

    @property
    def state(self) -> Literal["running", "ended", "unknown"]:
        """running: a server holds the store. ended: it was closed. unknown: it was killed or runs elsewhere."""
        return self._state

    @property
    def model_path(self) -> str:
        """Model of the server that wrote the store."""
        return self._table.model_path

    @property
    def deleted(self) -> int:
        """Number of deleted sessions whose records were read, without those of sub-agents."""
        return self._table.deleted

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes of the files."""
        return (self._next or (self._frames,))[0].progress

    @property
    def damaged(self) -> int:
        """Number of places that could not be read."""
        return self._frames.faults.damaged

    @property
    def warnings(self) -> list[str]:
        """The first faults of the files, each with its file and byte."""
        lost = self._table.incomplete
        more = [f"{self.folder}: {lost:,} records are of sessions that are deleted or were lost."] if lost else []
        return [*self._frames.faults.warnings, *more]

    def sessions(
        self,
        *,
        group: str | None = None,
        order: SessionOrder = "newest",
        after: int = 0,
        limit: int = 100,
        children: bool = False,
    ) -> SessionPage:
        """Return sessions, `limit` at most, from number `after` of the order on.

        With `children`, those of sub-agents are in the list, too.
        """
        with self._lock:
            found = [
                entry
                for entry in self._table.sessions.values()
                if (children or not entry.parent) and group in (None, entry.group)
            ]
            found.sort(key=_SORTED_BY[order.removeprefix("-")], reverse=order == "newest" or order.startswith("-"))
            if order.endswith("reward"):
                found.sort(key=lambda entry: entry.reward is None)
            rows = [_row(entry) for entry in found[after : after + limit]]
        next_page = after + limit if after + limit < len(found) else None
        return SessionPage(rows=rows, after=next_page, total=len(found))

    def session(self, session: str) -> SessionRow:
        """Return one session. Raise SessionNotFoundError."""
        with self._lock:
            return _row(self._entry(session))

    def metadata(self, session: str) -> dict[str, Any]:
        """Return what the creator of a session stored with it. Raise SessionNotFoundError."""
        return self._stored(session, has_turns=False)[0].record.metadata

    def branches(self, session: str) -> list[StoredBranch]:
        """Return the branches of a session. Raise SessionNotFoundError."""
        return [_stored_branch(branch) for branch in self._stored(session)[0].branches()]

    def trajectories(self, session: str) -> Iterator[Trajectory]:
        """Yield a trajectory for each of the `branches`, as an agents' run records them.

        Times are in `Trajectory.events`, seconds since the session was created. One branch is in memory at a time.
        Raise SessionNotFoundError, or BadRequestError if the files have changed meanwhile: ask again after `poll`.
        """
        stored, row = self._stored(session)
        known: set[int] = set()
        for branch in stored.branches():
            trajectory = stored.trajectory(branch, known)
            trajectory.reward = row.reward
            trajectory.stop_reason = stop_reason(row.state, row.reason)
            yield trajectory

    def _locked(self, table: StoreTable) -> Callable[[Any], None]:
        def apply(frame: Any) -> None:
            with self._lock:
                table.apply(frame)

        return apply

    def _state_now(self) -> Literal["running", "ended", "unknown"]:
        if is_claimed(self.folder / LOCK):
            return "running"
        return "unknown" if current_size(self.folder) is None else "ended"

    def _entry(self, session: str) -> SessionEntry:
        entry = self._table.sessions.get(session)
        if entry is None:
            raise SessionNotFoundError(f"The store has no session {session[:140]}. It may have been deleted.")
        return entry

    def _stored(self, session: str, *, has_turns: bool = True) -> tuple[StoredSession, SessionRow]:
        with self._lock:
            entry, frames = self._entry(session), self._frames
            row, turns, delivered = _row(entry), entry.turns[:] if has_turns else None, entry.delivered
        return read_stored(frames, entry.place, turns, delivered), row


_SORTED_BY: dict[str, Callable[[SessionEntry], float]] = {
    "newest": lambda entry: entry.number,
    "oldest": lambda entry: entry.number,
    "reward": lambda entry: entry.reward or 0.0,
    "tokens": lambda entry: entry.tokens,
    "turns": lambda entry: len(entry.turns),
}


def _row(entry: SessionEntry) -> SessionRow:
    return SessionRow(
        session=entry.id,
        parent=entry.parent,
        children=list(entry.children or ()),
        group=entry.group,
        state=entry.state,
        reason=entry.reason,
        created=entry.created,
        active=entry.active,
        ended=entry.ended,
        turns=len(entry.turns) // 3,
        running=entry.running.bit_count(),
        tokens=entry.tokens,
        sampled=entry.sampled,
        reward=entry.reward,
        generate_seconds=entry.generate_seconds,
        oldest_version=entry.oldest_version,
        newest_version=entry.newest_version,
    )


def _stored_branch(branch: Branch) -> StoredBranch:
    return StoredBranch(
        branch=branch.branch,
        kind=branch.kind,
        fork_of=branch.fork_of,
        shared=branch.shared_tokens,
        turns=[turn.turn for turn in branch.turns],
        tokens=len(branch.ids),
        sampled=sum(branch.loss_mask),
    )
