"""`StoredTurn`: a finished turn of a session with its id and its whole prompt, for exports and repeated answers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from verl_server.messages.session_types import PolicyLogprobs
from verl_server.sampling_params import EDITS, FILTERS
from verl_server.server.sessions import turn as turns_of
from verl_server.server.sessions.records import SessionRecord
from verl_server.server.sessions.turn import Turn


class NodesOfSession(Protocol):
    """The message tree of one session."""

    @property
    def data(self) -> bytes | bytearray: ...


class TurnsOfSession(Protocol):
    """One session and its turns: `session.Session` in the server, another class in a reader of the store."""

    @property
    def id(self) -> str: ...

    @property
    def record(self) -> SessionRecord: ...

    @property
    def root(self) -> TurnsOfSession: ...

    @property
    def nodes(self) -> NodesOfSession: ...

    @property
    def turns(self) -> Sequence[Turn | None]: ...

    def turn(self, number: int) -> Turn: ...


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A finished turn with its id."""

    session: TurnsOfSession
    turn: int

    @property
    def stored(self) -> Turn:
        return self.session.turn(self.turn)

    @property
    def conditions(self) -> dict[str, Any]:
        """The parameters that shaped the distribution: `BranchTurn.sampling`."""
        stored = self.stored
        known = msgspec.json.decode(stored.sampling, type=dict[str, Any]) if stored.sampling else {}
        return known if stored.seed is None else known | {"sampling_seed": stored.seed}

    @property
    def policy_logprobs(self) -> PolicyLogprobs:
        """The value of `BranchTurn.policy_logprobs`.

        It is "unknown" for an old record that may have edits or filters.
        """
        stored = self.stored
        if stored.policy_logprobs is not None:
            return stored.policy_logprobs
        is_plain = bool(stored.sampling) and not self.conditions.keys() & {*EDITS, *FILTERS, "grammar"}
        return "same" if is_plain else "unknown"

    @property
    def overridden(self) -> dict[str, Any]:
        """`BranchTurn.overridden`: parameters that the request set to other values than the session forces."""
        found = self.stored.overridden
        return msgspec.json.decode(found, type=dict[str, Any]) if found else {}

    def prompt_ids(self) -> list[int]:
        prompt = turns_of.sequence(self.session.turns, self.turn, self.stored.prompt_tokens)
        return list(struct.unpack(f"<{len(prompt) // 4}i", prompt))

    def output_ids(self) -> list[int]:
        return list(struct.unpack(f"<{len(self.stored.output) // 4}i", self.stored.output))

    def output_logprobs(self) -> list[float]:
        return list(struct.unpack(f"<{len(self.stored.logprobs) // 4}f", self.stored.logprobs))

    def output_policy(self) -> list[float]:
        """Return the policy's log-probabilities of the output, or [] unless they are "given"."""
        return list(struct.unpack(f"<{len(self.stored.policy) // 4}f", self.stored.policy))

    def output_choices(self) -> list[int]:
        """Return 0 or 1 for each output token, or [] if no mask was counted."""
        return list(self.stored.has_choice)


def stored_turns(session: TurnsOfSession) -> list[StoredTurn]:
    """Return the finished turns of a session, by id."""
    return [StoredTurn(session, i) for i, turn in enumerate(session.turns) if turn is not None]
