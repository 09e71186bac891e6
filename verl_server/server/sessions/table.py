"""`SessionTable`: all sessions of one server in memory, built from the records.

Only `apply` changes the set of sessions and finished turns. So a restarted server that applies the records of an
earlier run has the same sessions. The ledgers own the table. Routes and the check of keys read it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable

from verl_server.chat.history import NODE
from verl_server.errors import SessionNotFoundError
from verl_server.server.sessions.records import (
    BeginRecord,
    DeleteRecord,
    DeliveredRecord,
    FinishRecord,
    Record,
    RewardRecord,
    SessionRecord,
    TurnRecord,
)
from verl_server.server.sessions.session import Session
from verl_server.server.sessions.turn import Turn

AUTOMATIC = "auto-"
"""Prefix of the generated names of child conversations that have no name."""


def hash_of_key(key: str) -> bytes:
    """Return the hash of a session key, under which the session is found. The key itself is not stored."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def memory_of(value: object) -> int:
    """Return the bytes that decoded JSON takes in memory. `check_new` bounds the size of the argument."""
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        size += sys.getsizeof(each)
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            waiting += each
    return size


class SessionTable:
    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[bytes, str] = {}
        self.read_after_end: dict[str, None] = {}
        """Sessions that ended and whose trajectory was read since, in this order.

        They are deleted first to make room.
        """
        self.memory = 0
        """Approximate bytes of all sessions."""
        self.last_version: str | None = None
        """Weight version of the last stored turn."""
        self.is_complete = True
        """False while the sessions of an earlier run are being read from the store.

        Until then any session may exist.
        """

    def find(self, session_id: str) -> Session:
        """Return a session. Raise SessionNotFoundError."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(f"There is no session {session_id[:140]}. It may have been deleted.")
        return session

    def get(self, session_id: str) -> Session | None:
        """Return a session, or None if there is none of this id."""
        return self._sessions.get(session_id)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __len__(self) -> int:
        """Return the number of sessions, children included."""
        return len(self._sessions)

    def of_key(self, key: str) -> str | None:
        """Return the id of the session that a session key names, or None for an unknown key."""
        return self._by_key.get(hash_of_key(key))

    def roots(self) -> Iterable[Session]:
        """Return all sessions without a parent, oldest first."""
        return (session for session in self._sessions.values() if session.owner is None)

    def all(self) -> list[Session]:
        """Return all sessions, children included, oldest first."""
        return list(self._sessions.values())

    def family(self, session: Session) -> list[Session]:
        """Return a session and its child sessions."""
        return [session, *(self._sessions[child] for child in session.children.values())]

    def measure(self, session: Session) -> None:
        """Count the memory of a session that has changed."""
        size = session.size
        self.memory += size - session.counted
        session.counted = size

    def apply(self, record: Record) -> None:
        """Apply a record to the sessions in memory.

        Raise KeyError or IndexError if it does not fit the earlier records.
        """
        match record:
            case SessionRecord():
                if record.id in self._sessions:
                    raise KeyError(f"an end of the other session {record.id}")
                owner = None if record.parent is None else self._sessions[record.parent]
                session = Session(record, owner, active=record.created)
                self._sessions[record.id] = session
                if record.key_hash:
                    self._by_key[record.key_hash] = record.id
                if owner is not None:
                    owner.children[record.id.removeprefix(f"{owner.id}.")] = record.id
                session.payload += memory_of([record.metadata, record.sampling, record.forced]) + 4 * len(record.group)
                self.measure(session)
            case BeginRecord():
                session = self._sessions[record.session]
                session.turns += [None] * (record.turn + 1 - len(session.turns))
                session.root.started += 1
                if record.key is not None:
                    session.keys.setdefault(record.key, []).append(record.turn)
                self.measure(session)
            case TurnRecord():
                self._apply_turn(self._sessions[record.session], record)
            case DeliveredRecord():
                self._sessions[record.session].deliver(record.turn)
            case RewardRecord():
                session = self._sessions[record.session]
                session.add_reward(record)
                self.measure(session)
            case FinishRecord():
                session = self._sessions[record.session]
                if record.state == "expired" and record.reason in ("seconds", "idle_seconds"):
                    session.limit = record.reason
                session.state = "expired" if record.state == "expired" else "finished"
                session.reason, session.ended = record.reason, record.time
                self._by_key.pop(session.record.key_hash, None)
            case DeleteRecord():
                for each in self.family(self._sessions[record.session]):
                    del self._sessions[each.id]
                    self._by_key.pop(each.record.key_hash, None)
                    self.read_after_end.pop(each.id, None)
                    self.memory -= each.counted

    def _apply_turn(self, session: Session, record: TurnRecord) -> None:
        if record.parent >= 0 and session.turns[record.parent] is None:
            raise KeyError(f"turn {record.parent} of session {session.id}")
        have = len(session.nodes) - record.first_node
        if have < 0:
            raise KeyError(f"message {len(session.nodes)} of session {session.id}")
        turn = Turn.of(record, session.once)
        session.add(record.turn, turn)
        session.nodes.extend(record.nodes[have * NODE.size :])
        session.stored_nodes = len(session.nodes)
        self.measure(session)
        session.branches = max(session.branches, turn.branch + 1)
        if turn.child is not None and turn.child.startswith(AUTOMATIC):
            session.conversations = max(session.conversations, int(turn.child.removeprefix(AUTOMATIC)))
        session.active = session.root.active = max(session.root.active, record.times[2])
        session.root.sampled += turn.output_tokens
        if session.owner is not None:
            session.sampled += turn.output_tokens
        if turn.spans:
            self.last_version = turn.spans[-1][0]
