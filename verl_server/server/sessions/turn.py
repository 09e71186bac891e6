"""One generation of a session: `OpenTurn` while it runs, `FinishedTurn` when it is done, and `Turn` in the ledger.

A `Turn` has few bytes. Of the prompt it keeps only the ids behind those that the parent's sequence (prompt and output)
has too; `sequence` joins them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verl_server.chat.session_view import CompletionText, Ids32, NextTurn, ReplyFacts, ReplyMessage
from verl_server.messages.session_types import ForcedMode, PolicyLogprobs
from verl_server.server.sessions.records import TurnRecord

IN_REASONING, ABORTED, DELIVERED, RESAMPLED = 1, 2, 4, 8
"""Bits of `Turn.flags`."""

_TIMES = struct.Struct("<3d")
_FIXED_BYTES = 1200
"""Bytes of a turn beside its ids, log-probabilities and calls, with its places in the tables of the session."""


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn that is being generated."""

    session_id: str
    turn: int
    parent: int
    shared: int
    """First ids of the prompt that are the parent's sequence."""
    prompt: Ids32
    """The whole prompt."""
    sibling: int
    seed: int | None
    sampling: dict[str, Any]
    forced: dict[str, Any]
    forced_mode: ForcedMode
    max_new_tokens: int | None
    """What the limits leave; None: no limit."""


@dataclass(slots=True)
class FinishedTurn:
    """What the ledger stores of a turn."""

    next: NextTurn
    output: Ids32
    logprobs: bytes
    """float32, one for each output id."""
    spans: list[tuple[str, int]]
    finish: tuple[str, str | int | None]
    reply: ReplyMessage
    times: tuple[float, float, float]
    dialect: str
    rid: str
    sampling: bytes = b""
    """JSON: `BranchTurn.sampling` without the seed."""
    policy_logprobs: PolicyLogprobs = "unknown"
    policy: bytes = b""
    """float32, one for each output id, with `policy_logprobs` "given"."""
    has_choice: bytes = b""
    """uint8, one for each output id, or empty."""
    overridden: bytes = b""
    """JSON: `BranchTurn.overridden`, or empty."""
    seed: int | None = None
    end_token: int = -1
    aborted: bool = False
    key: bytes | None = None
    body: bytes | None = None


@dataclass(slots=True)
class Turn:
    parent: int
    """-1: a root."""
    shared: int
    """First tokens of the prompt that are the parent's sequence."""
    prompt: bytes
    """int32 ids of the prompt behind the shared ones."""
    output: bytes
    logprobs: bytes
    spans: tuple[tuple[str, int], ...]
    finish: tuple[str, str | int | None]
    times: bytes
    generation_prompt: int
    end_token: int
    flags: int
    prompt_node: int
    reply_node: int
    sibling: int
    branch: int
    options: bytes
    calls: bytes | None
    sampling: bytes
    policy_logprobs: PolicyLogprobs | None
    policy: bytes
    has_choice: bytes
    overridden: bytes
    seed: int | None
    key: bytes | None
    body: bytes | None
    dialect: str
    rid: str
    child: str | None
    completion: CompletionText | None
    size: int = field(default=0, compare=False)
    """Bytes of memory, about."""
    followers: int = field(default=0, compare=False)
    """Finished turns whose parent this is."""
    extensions: int = field(default=0, compare=False)
    """Turns that finished or run, and continue the whole sequence."""
    facts_at: int = field(default=0, compare=False)
    """Place of `packed_facts` in `Session.facts`."""

    @classmethod
    def of(cls, record: TurnRecord, shared_values: dict[object, object]) -> Turn:
        """Return the turn of a record. `shared_values` holds values that many turns have in common once."""
        size = _size(record)

        def once(value: object) -> object:
            nonlocal size
            if value not in shared_values:
                shared_values[value] = value
                size += 200 + (len(value) if isinstance(value, bytes) else 0)
            return shared_values[value]

        spans = tuple((sys.intern(version), start) for version, start in record.spans)
        turn = cls(
            parent=record.parent,
            shared=record.shared,
            prompt=record.prompt,
            output=record.output,
            logprobs=record.logprobs,
            spans=once(spans) if len(spans) == 1 else spans,  # type: ignore[arg-type]
            finish=once(tuple(record.finish)),  # type: ignore[arg-type]
            times=_TIMES.pack(*record.times),
            generation_prompt=record.generation_prompt,
            end_token=record.end_token,
            flags=record.flags,
            prompt_node=record.prompt_node,
            reply_node=record.reply_node,
            sibling=record.sibling,
            branch=record.branch,
            options=once(record.options),  # type: ignore[arg-type]
            calls=record.calls,
            sampling=once(record.sampling),  # type: ignore[arg-type]
            policy_logprobs=record.policy_logprobs,
            policy=record.policy,
            has_choice=record.has_choice,
            overridden=once(record.overridden),  # type: ignore[arg-type]
            seed=record.seed,
            key=record.key,
            body=record.body,
            dialect=sys.intern(record.dialect),
            rid=record.rid,
            child=None if record.child is None else sys.intern(record.child),
            completion=record.completion,
        )
        turn.size = size
        return turn

    def packed_facts(self, number: int) -> bytes:
        """Return what the next prompt needs of this turn, whose number is given: `ReplyFacts` as msgpack."""
        calls = [] if self.calls is None else msgspec.json.decode(self.calls)
        return msgspec.msgpack.encode(
            ReplyFacts(
                delivered=bool(self.flags & DELIVERED),
                turn=number,
                parent=self.parent,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                generation_prompt=self.generation_prompt,
                end_token=self.end_token,
                in_reasoning=bool(self.flags & IN_REASONING),
                aborted=bool(self.flags & ABORTED),
                calls=[(call["id"], call["name"]) for call in calls],
                options=self.options,
                text=self.completion,
            )
        )

    @property
    def prompt_tokens(self) -> int:
        return self.shared + len(self.prompt) // 4

    @property
    def output_tokens(self) -> int:
        return len(self.output) // 4

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return self.prompt_tokens + self.output_tokens

    @property
    def is_delivered(self) -> bool:
        return bool(self.flags & DELIVERED)

    @property
    def accepted_first_finished(self) -> tuple[float, float, float]:
        accepted, first, finished = _TIMES.unpack(self.times)
        return accepted, first, finished


def _size(record: TurnRecord) -> int:
    """Return the bytes of a turn in memory, about, without the values that several turns have in common."""
    payload = len(record.prompt) + len(record.output) + len(record.logprobs) + len(record.calls or b"")
    payload += len(record.policy) + len(record.has_choice) + len(record.rid)
    spans = 150 * (len(record.spans) - 1) if len(record.spans) > 1 else 0
    text = 0 if record.completion is None else 300 + len(record.completion.hidden)
    return _FIXED_BYTES + payload + spans + text


def sequence(turns: Sequence[Turn | None], turn: int, kept: int | None = None) -> bytes:
    """Return the int32 ids of prompt and output of a turn, or the first `kept` of them."""
    pieces: list[bytes] = []
    limit = sys.maxsize if kept is None else kept
    while turn >= 0 and limit > 0:
        each = turns[turn]
        assert each is not None, "a parent is a finished turn"
        if limit > each.shared:
            own = each.prompt + each.output
            pieces.append(own[: 4 * (limit - each.shared)])
        limit, turn = min(limit, each.shared), each.parent
    return b"".join(reversed(pieces))


def common_prefix(first: bytes, second: bytes) -> int:
    """Return the number of int32 ids at the start that are equal in both."""
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:  # compare halves: memcmp is fast, a loop over ids is not
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
