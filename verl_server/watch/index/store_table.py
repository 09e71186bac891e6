"""`StoreTable`: the figures of all sessions of a store, and the places of their records. `SessionStore` asks it.

It applies the records as `server.sessions.table` does, but keeps numbers only: some hundred bytes a session and 24 a
turn.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verl_server.messages.session_types import SessionState
from verl_server.server.sessions.records import (
    KIND_OF,
    BeginRecord,
    DamagedRecordError,
    DeleteRecord,
    DeliveredRecord,
    FinishRecord,
    HeaderRecord,
    RewardRecord,
    SessionRecord,
    TurnRecord,
    decoded,
)
from verl_server.watch.index.store_frames import Frame


class _TurnHead(msgspec.Struct):
    """The fields of a `TurnRecord` that count."""

    session: str
    turn: int
    shared: int
    prompt: memoryview
    output: memoryview
    spans: list[tuple[str, int]]
    times: tuple[float, float, float]


MOST_TURNS = 2**16
"""Turns of a session beyond which they are not read."""
_TURN = KIND_OF[TurnRecord]
_TURN_HEAD = msgspec.msgpack.Decoder(_TurnHead)


@dataclass(slots=True, eq=False)
class SessionEntry:
    """What is kept of a session."""

    id: str
    number: int
    """Number of the session in the order of their creation."""
    place: tuple[int, int]
    """File and offset of its `SessionRecord`."""
    parent: str
    group: str
    created: float
    active: float
    turns: array[int] = field(default_factory=lambda: array("q"))
    """Number, file and offset of each finished turn, in the order of their ends."""
    running: int = 0
    """Bit N is set if turn N has begun and has no end."""
    delivered: int = 0
    """Bit N is set if the reply of turn N reached the client."""
    children: list[str] | None = None
    rewards: dict[tuple[int | None, str], float] | None = None
    state: SessionState = "open"
    reason: str = ""
    ended: float | None = None
    tokens: int = 0
    """Tokens of the longest turn, its prompt included."""
    sampled: int = 0
    generate_seconds: float = 0.0
    oldest_version: str = ""
    newest_version: str = ""

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of the whole session, by name."""
        own = [value for (turn, _), value in (self.rewards or {}).items() if turn is None]
        return sum(own) if own else None


class StoreTable:
    def __init__(self) -> None:
        self.sessions: dict[str, SessionEntry] = {}
        self.deleted = 0
        """Number of sessions that were deleted, without those of sub-agents."""
        self.incomplete = 0
        """Number of records whose session is unknown: it was deleted, or its record was lost."""
        self.model_path = ""
        self._created = 0

    def apply(self, frame: Frame) -> None:
        """Apply one record. Raise DamagedRecordError if it is none."""
        kind = frame.body[0]
        if kind == _TURN:
            self._finish_turn(frame)
            return
        record: Any = decoded(frame.body)
        match record:
            case HeaderRecord():
                self.model_path = record.model_path
            case SessionRecord():
                self._create(record, (frame.file, frame.offset))
            case DeleteRecord():
                self._delete(record.session)
            case BeginRecord() | DeliveredRecord() | RewardRecord() | FinishRecord():
                session = self.sessions.get(record.session)
                if session is None:
                    self.incomplete += 1
                else:
                    _change(session, record)

    def _create(self, record: SessionRecord, place: tuple[int, int]) -> None:
        parent = record.parent or ""
        if record.id in self.sessions:
            self._delete(record.id)
        self._created += 1
        created = record.created
        self.sessions[record.id] = SessionEntry(
            record.id, self._created, place, parent, sys.intern(record.group), created, created
        )
        if (owner := self.sessions.get(parent)) is not None:
            owner.children = [*(owner.children or ()), record.id]

    def _delete(self, session_id: str) -> None:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.deleted += not session.parent
            for child in session.children or ():
                self.sessions.pop(child, None)

    def _finish_turn(self, frame: Frame) -> None:
        try:
            turn = _TURN_HEAD.decode(frame.body[1:])
        except (msgspec.DecodeError, ValueError) as error:
            raise DamagedRecordError(f"the payload is malformed: {error}") from None
        session = self.sessions.get(turn.session)
        if session is None:
            self.incomplete += 1
            return
        session.running &= ~_bit(turn.turn)
        if not 0 <= turn.turn < MOST_TURNS:
            raise DamagedRecordError(
                f"turn {turn.turn} of session {session.id} is beyond the {MOST_TURNS:,} that are read"
            )
        output = len(turn.output) // 4
        session.turns.extend((turn.turn, frame.file, frame.offset))
        session.tokens = max(session.tokens, turn.shared + len(turn.prompt) // 4 + output)
        session.sampled += output
        accepted, _, ended = turn.times
        session.generate_seconds += max(0.0, ended - accepted)
        session.active = max(session.active, ended)
        if turn.spans:
            session.oldest_version = session.oldest_version or sys.intern(turn.spans[0][0])
            session.newest_version = sys.intern(turn.spans[-1][0])


def _change(session: SessionEntry, record: BeginRecord | DeliveredRecord | RewardRecord | FinishRecord) -> None:
    match record:
        case BeginRecord():
            session.running |= _bit(record.turn)
        case DeliveredRecord():
            session.delivered |= _bit(record.turn)
        case RewardRecord():
            session.rewards = session.rewards or {}
            session.rewards[record.turn, record.name] = record.reward
        case FinishRecord():
            session.state = "expired" if record.state == "expired" else "finished"
            session.reason, session.ended = record.reason[:200], record.time


def _bit(turn: int) -> int:
    return 1 << turn if 0 <= turn < MOST_TURNS else 0
