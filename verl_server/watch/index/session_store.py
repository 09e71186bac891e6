"""`SessionStore`: the sessions in a server's store, read while the server may write it.

The page's server asks it, from any thread. The store is only read: no lock, no mode and no byte changes. `poll` reads
the records that were appended since the last call, and begins again when a snapshot has replaced the journals. Of a
turn only its figures and its place are kept; its tokens and texts are read when they are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_server.messages.session_types import SessionState
from verl_server.rollout.trajectory import Trajectory

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


class SessionUnknown(KeyError):
    """The store has no session of this id. It may have been deleted."""


class SessionStore:
    def __init__(self, folder: Path) -> None:
        """`folder` is the one of `--session-store`. Nothing is read before `poll`."""
        self.generation = 0
        """Grows when a call of `poll` found something new."""
        self.model_path = ""
        """Model of the server that wrote the store."""
        self.deleted = 0
        """Number of deleted sessions whose records were read."""
        raise NotImplementedError

    def poll(self, seconds: float = 1.0) -> bool:
        """Read new records for about `seconds`. Return True if something was new."""
        raise NotImplementedError

    @property
    def state(self) -> Literal["running", "ended", "unknown"]:
        """running: a server holds the store. ended: it was closed. unknown: it was killed or runs elsewhere."""
        raise NotImplementedError

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes of the files."""
        raise NotImplementedError

    @property
    def damaged(self) -> int:
        """Number of places that could not be read."""
        raise NotImplementedError

    @property
    def warnings(self) -> list[str]:
        """The first faults of the files, each with its file and byte."""
        raise NotImplementedError

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
        raise NotImplementedError

    def session(self, session: str) -> SessionRow:
        """Raise SessionUnknown."""
        raise NotImplementedError

    def metadata(self, session: str) -> dict[str, Any]:
        """Return what the creator of a session stored with it. Raise SessionUnknown."""
        raise NotImplementedError

    def trajectories(self, session: str) -> list[Trajectory]:
        """Return a trajectory for each branch of a session, as an agents' run records them. Raise SessionUnknown.

        Times are in `Trajectory.events`, seconds since the session was created.
        """
        raise NotImplementedError
