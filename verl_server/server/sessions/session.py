"""`Session`: the turns, the message tree and the rewards of one session, and the counts for its limits.

The ledger owns the sessions. It changes one only by applying records, so a restarted server that reads the same records
has the same session. A child session has a conversation of its own, and counts against the limits of its parent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from verl_server.chat.session_view import Ids32, NextTurn
from verl_server.messages.session_types import SessionInfo, SessionLimits, SessionState, TurnInfo
from verl_server.server.sessions.message_nodes import MessageNodes
from verl_server.server.sessions.records import RewardRecord, SessionRecord
from verl_server.server.sessions.turn import ABORTED, DELIVERED, RESAMPLED, Turn
from verl_server.server.slices import Slices

CHILD_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIXED_BYTES = 4096
"""Bytes of an empty session."""
_KEY_BYTES = 300
"""Bytes of an idempotency key."""
_REWARD_BYTES = 220
"""Bytes of a reward without its name."""
_PENDING_BYTES = 1500
"""Bytes of a running turn without its ids, messages and nodes."""


@dataclass(frozen=True, slots=True)
class SessionCaller:
    """The session of a request: `scope["state"]["session"]`. Absent outside a session."""

    session_id: str
    child: str | None
    """Header X-Session-Child."""
    is_owner: bool
    """True if X-Session-ID beside an owner's key named the session."""
    scope_key: bytes
    """16 bytes: a hash of the caller's key, for idempotency."""


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn that is being generated."""

    session: Session
    turn: int
    next: NextTurn
    parent: int
    shared: int
    """Number of leading ids of the prompt that are also the beginning of the parent's sequence."""
    prompt: Ids32
    """The whole prompt."""
    own: Ids32
    """The ids of the prompt after the shared ids."""
    prompt_node: int
    sibling: int
    branch: int
    child: str | None
    seed: int | None
    max_new_tokens: int | None
    """Number of tokens that the limits permit for the output. None: no limit."""
    key: bytes | None
    """Idempotency key."""
    resampled: bool
    abort: Callable[[], object] | None = None


@dataclass(slots=True)
class Session:
    record: SessionRecord
    owner: Session | None = None
    """The parent session, whose limits count. None: this session has no parent."""
    turns: list[Turn | None] = field(default_factory=list)
    """Turns by turn id. None stands for a turn that runs, or that was cancelled or interrupted."""
    pending: dict[int, OpenTurn] = field(default_factory=dict)
    nodes: MessageNodes = field(default_factory=MessageNodes)
    stored_nodes: int = 0
    """Number of nodes of finished turns that were passed to the store."""
    children: dict[str, str] = field(default_factory=dict)
    """Name of a child session -> its id."""
    conversations: int = 0
    """Conversations of this session that share no message with the first conversation."""
    branches: int = 0
    keys: dict[bytes, list[int]] = field(default_factory=dict)
    """Idempotency key -> turns that began for it, without aborted and cancelled turns."""
    rids: dict[str, int] = field(default_factory=dict)
    """Name of a request -> its last finished turn."""
    facts: bytearray = field(default_factory=bytearray)
    """`ReplyFacts` of the finished turns as concatenated msgpack."""
    finished: int = 0
    """Number of finished turns, without child sessions."""
    output_tokens: int = 0
    """Number of sampled tokens of the finished turns, without child sessions."""
    once: dict[object, object] = field(default_factory=dict)
    """Values that many turns share."""
    _prompts: dict[bytes, int] = field(default_factory=dict)
    """Hash of (parent, shared, prompt) -> number of the turns that finished or run with it."""
    _roots: dict[bytes, str | None] = field(default_factory=dict)
    """Hash of a conversation's prompt -> name of the child conversation, None for the session's own."""
    rewards: dict[tuple[int | None, str], RewardRecord] = field(default_factory=dict)
    state: SessionState = "open"
    reason: str = ""
    active: float = 0.0
    ended: float = 0.0
    fetched: bool = False
    """True once the trajectory of the finished session was read."""
    sampled: int = 0
    """Number of sampled tokens, including child sessions."""
    started: int = 0
    """Number of finished and running turns, including child sessions."""
    in_flight: int = 0
    """Number of running turns, including child sessions."""
    limit: str | None = None
    """Field of `SessionLimits` that most recently refused or cut a generation."""
    payload: int = 0
    """Approximate bytes of finished turns, rewards and running turns."""
    counted: int = 0
    """Bytes of this session in the table's sum."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def root(self) -> Session:
        """The session whose limits count: the parent, or this session."""
        return self if self.owner is None else self.owner

    @property
    def child_name(self) -> str | None:
        """The name of a child session; None for a session without a parent."""
        return None if self.owner is None else self.id.rpartition(".")[2]

    @property
    def limits(self) -> SessionLimits:
        return self.root.record.limits

    @property
    def reward(self) -> float | None:
        """The sum of the rewards of the whole session, by name; None if there is none."""
        own = [each.reward for (turn, _), each in self.rewards.items() if turn is None]
        return sum(own) if own else None

    @property
    def size(self) -> int:
        """Approximate bytes of memory."""
        keys = _KEY_BYTES * len(self.keys)
        return _FIXED_BYTES + self.payload + keys + self.nodes.memory + len(self.facts) + 8 * len(self.turns)

    # -- turns ------------------------------------------------------------------------------------------------------

    def turn(self, number: int) -> Turn:
        """Return a turn that has finished."""
        turn = self.turns[number]
        assert turn is not None
        return turn

    def hold(self, turn: OpenTurn) -> None:
        """Add a turn that runs."""
        self.pending[turn.turn] = turn
        self.root.in_flight += 1
        self.payload += _open_size(turn)
        self._count(turn, turn.own, 1)

    def release(self, number: int) -> bool:
        """Remove a turn that runs. Return False if there is none of this number."""
        turn = self.pending.pop(number, None)
        if turn is None:
            return False
        self.root.in_flight -= 1
        self.payload -= _open_size(turn)
        self._count(turn, turn.own, -1)
        return True

    def add(self, number: int, turn: Turn) -> None:
        """Add a finished turn."""
        self.turns[number] = turn
        self._count(turn, turn.prompt, 1)
        if turn.parent >= 0 and (parent := self.turns[turn.parent]) is not None:
            parent.followers += 1
        self.finished += 1
        self.output_tokens += turn.output_tokens
        self.payload += turn.size
        self.rids[turn.rid] = number
        turn.facts_at = len(self.facts)
        self.facts += turn.packed_facts(number)
        if turn.flags & ABORTED and turn.key is not None:
            self.forget_key(turn.key, number)  # the key's request was not answered

    def deliver(self, number: int) -> None:
        """Record that the whole reply of a finished turn reached the client."""
        turn = self.turns[number]
        if turn is not None:
            turn.flags |= DELIVERED
            self.facts[turn.facts_at : turn.facts_at + 2] = turn.packed_facts(number)[:2]

    def add_reward(self, record: RewardRecord) -> None:
        place = (record.turn, record.name)
        if place not in self.rewards:
            self.payload += _REWARD_BYTES + len(record.name)
        self.rewards[place] = record

    def forget_key(self, key: bytes, turn: int) -> None:
        """Remove a turn from those of an idempotency key."""
        turns = self.keys.get(key, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self.keys.pop(key, None)

    def siblings(self, parent: int, shared: int, prompt: bytes) -> int:
        """Return the number of turns that have, or will have, this prompt."""
        return self._prompts.get(_place(parent, shared, prompt), 0)

    def conversation(self, prompt: bytes) -> tuple[bool, str | None]:
        """Return (True if a conversation begins with this prompt, name of its child session or None)."""
        place = _place(-1, 0, prompt)
        return place in self._roots, self._roots.get(place)

    def _count(self, turn: Turn | OpenTurn, own: bytes, change: int) -> None:
        """Count a turn in the tables by prompt, or remove it from them. `own` are the ids after the shared ids."""
        place = _place(turn.parent, turn.shared, own)
        count = self._prompts.get(place, 0) + change
        if count:
            self._prompts[place] = count
        else:
            self._prompts.pop(place, None)
        if turn.parent < 0 and turn.shared == 0:
            if count:
                self._roots[place] = turn.child
            else:
                self._roots.pop(place, None)
        if turn.parent >= 0 and turn.shared == self.turn(turn.parent).tokens:
            self.turn(turn.parent).extensions += change

    @property
    def unrecorded_turns(self) -> int:
        """Number of turns that began, no longer run, and of which no token is recorded."""
        return sum(turn is None and number not in self.pending for number, turn in enumerate(self.turns))

    def was_interrupted(self, key: bytes) -> bool:
        """Return True if a turn of this idempotency key began and will not end."""
        return any(self.turns[turn] is None and turn not in self.pending for turn in self.keys.get(key, ()))

    def info(self) -> SessionInfo:
        """Return the session without its tree."""
        return SessionInfo(
            id=self.id,
            group=self.root.record.group,
            state=self.root.state,
            reason=self.root.reason,
            turns=self.finished,
            tokens=self.output_tokens,
            reward=self.reward,
            created=self.record.created,
            active=self.active,
            metadata=self.record.metadata,
            in_flight=self.root.in_flight,
            limit=self.root.limit,
            children=list(self.children.values()),
        )

    async def tree(self) -> AsyncIterator[TurnInfo]:
        """Yield the finished turns without their tokens, in slices."""
        slices = Slices()
        for number, turn in enumerate(list(self.turns)):
            if turn is not None:
                await slices.end()
                yield TurnInfo(
                    turn=number,
                    parent=turn.parent,
                    shared=turn.shared,
                    prompt_tokens=turn.prompt_tokens,
                    output_tokens=turn.output_tokens,
                    finish_reason=turn.finish[0],
                    sibling=turn.sibling,
                    spans=list(turn.spans),
                    calls=[] if turn.calls is None else msgspec.json.decode(turn.calls),
                    times=turn.times,
                    delivered=bool(turn.flags & DELIVERED),
                    aborted=bool(turn.flags & ABORTED),
                    resampled=bool(turn.flags & RESAMPLED),
                )


def _open_size(turn: OpenTurn) -> int:
    next = turn.next
    return _PENDING_BYTES + len(turn.own) + len(next.added) + len(next.new_nodes) + len(next.messages)


def _place(parent: int, shared: int, prompt: bytes) -> bytes:
    hashed = hashlib.blake2b(b"%d %d " % (parent, shared), digest_size=16)
    hashed.update(prompt)
    return hashed.digest()
