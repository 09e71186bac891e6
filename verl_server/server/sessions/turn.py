"""One generation of a session: a `FinishedTurn` when it ends, and a `Turn` in the ledger.

A `Turn` is small: it does not store the ids at the beginning of its prompt that are also the beginning of the parent's
sequence (prompt and output). `sequence` joins the shared ids and the stored ids.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from verl_server.chat.session_view import NextTurn, ReplyFacts, ReplyMessage
from verl_server.server.sessions.records import SampledFields, TurnFields, TurnRecord

IN_REASONING, ABORTED, DELIVERED, RESAMPLED = 1, 2, 4, 8
"""Bits of `Turn.flags`."""

_FIXED_BYTES = 1200
"""Bytes of a turn without its ids, log-probabilities and calls, including its entries in the session's tables."""


class FinishedTurn(SampledFields, kw_only=True):
    """The data of an ended turn that the ledger stores."""

    next: NextTurn
    reply: ReplyMessage
    aborted: bool = False


class Turn(TurnFields, kw_only=True):
    """A finished turn in memory."""

    size: int = 0
    """Approximate bytes of memory."""
    followers: int = 0
    """Number of finished turns with this turn as their parent."""
    extensions: int = 0
    """Number of finished or running turns that continue the whole sequence of this turn."""
    facts_at: int = 0
    """Position of this turn's `packed_facts` in `Session.facts`."""

    @classmethod
    def of(cls, record: TurnRecord, shared_values: dict[object, object]) -> Turn:
        """Return the turn of a record. `shared_values` keeps one copy of each value that many turns share."""
        size = _size(record)

        def once(value: object) -> object:
            nonlocal size
            if value not in shared_values:
                shared_values[value] = value
                size += 200 + (len(value) if isinstance(value, bytes) else 0)
            return shared_values[value]

        fields = {name: getattr(record, name) for name in TurnFields.__struct_fields__}
        spans = tuple((sys.intern(version), start) for version, start in record.spans)
        fields |= {
            "spans": once(spans) if len(spans) == 1 else spans,
            "finish": once(tuple(record.finish)),
            "options": once(record.options),
            "sampling": once(record.sampling),
            "overridden": once(record.overridden),
            "dialect": sys.intern(record.dialect),
            "child": None if record.child is None else sys.intern(record.child),
            "began": None if record.began is None else sys.intern(record.began),
            "reply": record.reply if record.parsed is None else "",
        }
        turn = cls(**fields)
        turn.size = size
        return turn

    def packed_facts(self, number: int) -> bytes:
        """Return the `ReplyFacts` of this turn as msgpack, which the plan of the next prompt reads.

        `number` is the turn's number.
        """
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
        """Number of tokens of the sequence."""
        return self.prompt_tokens + self.output_tokens

    @property
    def is_delivered(self) -> bool:
        return bool(self.flags & DELIVERED)


def _size(record: TurnRecord) -> int:
    """Return the approximate bytes of a turn in memory, without values that several turns share."""
    payload = len(record.prompt) + len(record.output) + len(record.logprobs) + len(record.calls or b"")
    payload += len(record.policy) + len(record.has_choice) + len(record.rid) + len(record.messages)
    spans = 150 * (len(record.spans) - 1) if len(record.spans) > 1 else 0
    text = 0 if record.completion is None else 300 + len(record.completion.hidden)
    text += sum(map(sys.getsizeof, (record.reply,) if record.parsed is None else record.parsed))
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
