"""`Session`: the turns, the message tree and the rewards of one session, and what its limits leave.

The ledger owns the sessions. It changes one only by applying records, so a restarted server that reads the same records
has the same session. A child session has a conversation of its own, and counts against the limits of its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from verl_server.chat.history import NODE
from verl_server.chat.session_view import NextTurn
from verl_server.server.sessions.records import RewardRecord, SessionRecord
from verl_server.server.sessions.turn import ABORTED, DELIVERED, RESAMPLED, Turn
from verl_server.session_types import SessionInfo, SessionLimits, SessionState, TurnInfo

_FIXED_BYTES = 4096
"""Bytes of a session beside its turns and its message tree."""


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


@dataclass(slots=True)
class PendingTurn:
    """A turn that is being generated."""

    next: NextTurn
    parent: int
    shared: int
    sibling: int
    branch: int
    prompt: bytes
    """int32 ids behind the shared ones."""
    prompt_node: int
    child: str | None
    accepted: float
    resampled: bool
    room: int | None
    """Tokens that the limits left; None: no limit."""
    abort: Callable[[], None] | None = None


@dataclass(slots=True)
class Session:
    record: SessionRecord
    owner: Session | None = None
    """The parent whose limits count. None: this session has no parent."""
    turns: list[Turn | None] = field(default_factory=list)
    """By turn id. None: a turn that runs, or was cancelled or interrupted."""
    pending: dict[int, PendingTurn] = field(default_factory=dict)
    nodes: bytearray = field(default_factory=bytearray)
    stored_nodes: int = 0
    """Nodes that finished turns have handed to the store."""
    children: dict[str, str] = field(default_factory=dict)
    """Name of a child session -> its id."""
    conversations: int = 0
    """Conversations of this tree without a message in common with the first one."""
    branches: int = 0
    keys: dict[bytes, list[int]] = field(default_factory=dict)
    """Idempotency key -> turns that began for it."""
    rewards: dict[tuple[int | None, str], RewardRecord] = field(default_factory=dict)
    state: SessionState = "open"
    reason: str = ""
    active: float = 0.0
    ended: float = 0.0
    fetched: bool = False
    """True once the trajectory of the finished session was read."""
    sampled: int = 0
    """Sampled tokens, children included."""
    started: int = 0
    """Turns that finished or run, children included."""
    in_flight: int = 0
    """Turns that run, children included."""
    limit: str | None = None
    """Field of `SessionLimits` that refused or cut a generation last."""
    size: int = _FIXED_BYTES
    """Bytes of memory, about."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def root(self) -> Session:
        """The session whose limits count."""
        return self if self.owner is None else self.owner

    @property
    def limits(self) -> SessionLimits:
        return self.root.record.limits

    @property
    def reward(self) -> float | None:
        """The sum of the rewards of the whole session, by name; None if there is none."""
        own = [each.reward for (turn, _), each in self.rewards.items() if turn is None]
        return sum(own) if own else None

    def add_nodes(self, records: bytes, after: int) -> int:
        """Append messages that follow each other behind node `after`. Return the last node.

        A message that is there already is not appended again, so turns of equal messages have the same prompt node.
        """
        node = after
        for _, _, role, _, digest, reasoning, _, _ in NODE.iter_unpack(records):
            known = self._find(node, role, digest, reasoning)
            node = known if known >= 0 else self.append_node(node, -1, role, digest, reasoning)
        return node

    def append_node(self, parent: int, turn: int, role: int, digest: bytes, reasoning: bytes) -> int:
        """Append one message, and return its node."""
        node = len(self.nodes) // NODE.size
        self.nodes += NODE.pack(parent, turn, role, b"", digest, reasoning, 0, 0)
        return node

    def _find(self, parent: int, role: int, digest: bytes, reasoning: bytes) -> int:
        """Return the node of this message under `parent`, or -1. A sampled reply is another message."""
        start = 0
        while (at := self.nodes.find(digest, start)) >= 0:
            node, within = divmod(at - 12, NODE.size)
            if within == 0:
                known, turn, kind, _, _, thought, _, _ = NODE.unpack_from(self.nodes, node * NODE.size)
                if (known, turn, kind, thought) == (parent, -1, role, reasoning):
                    return node
            start = at + 1
        return -1

    def siblings(self, parent: int, shared: int, prompt: bytes) -> int:
        """Return the number of turns that have, or will have, this prompt."""
        turns = (*self.turns, *self.pending.values())
        return sum(
            turn is not None and turn.parent == parent and turn.shared == shared and turn.prompt == prompt
            for turn in turns
        )

    def was_interrupted(self, key: bytes) -> bool:
        """Return True if a turn of this idempotency key began and will not end."""
        return any(self.turns[turn] is None and turn not in self.pending for turn in self.keys.get(key, ()))

    def is_extended(self, turn: int) -> bool:
        """Return True if another turn continues the whole sequence of `turn`."""
        parent = self.turns[turn]
        assert parent is not None
        tokens = parent.tokens
        later = self.turns[turn + 1 :]
        return any(each is not None and each.parent == turn and each.shared == tokens for each in later) or any(
            each.parent == turn and each.shared == tokens for each in self.pending.values()
        )

    def info(self) -> SessionInfo:
        finished = [turn for turn in self.turns if turn is not None]
        return SessionInfo(
            id=self.id,
            group=self.root.record.group,
            state=self.root.state,
            reason=self.root.reason,
            turns=len(finished),
            tokens=sum(turn.output_tokens for turn in finished),
            reward=self.reward,
            created=self.record.created,
            active=self.active,
            metadata=self.record.metadata,
            in_flight=self.root.in_flight,
            limit=self.root.limit,
            children=list(self.children.values()),
        )

    def tree(self) -> list[TurnInfo]:
        """Return the finished turns without their tokens."""
        return [
            TurnInfo(
                turn=i,
                parent=turn.parent,
                shared=turn.shared,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                finish_reason=turn.finish[0],
                sibling=turn.sibling,
                spans=list(turn.spans),
                calls=[] if turn.calls is None else msgspec.json.decode(turn.calls),
                times=turn.accepted_first_finished,
                delivered=bool(turn.flags & DELIVERED),
                aborted=bool(turn.flags & ABORTED),
                resampled=bool(turn.flags & RESAMPLED),
            )
            for i, turn in enumerate(self.turns)
            if turn is not None
        ]
