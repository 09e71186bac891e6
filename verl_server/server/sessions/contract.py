"""The seams between the parts of sessions, while they are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_server.chat.session_view import CompletionText, Ids32, NextTurn, ReplyFacts, ReplyMessage, SessionView

__all__ = [
    "CompletionText",
    "FinishedTurn",
    "Ids32",
    "Ledger",
    "NextTurn",
    "OpenTurn",
    "ReplyFacts",
    "ReplyMessage",
    "SessionCaller",
    "SessionView",
    "StoredTurn",
]


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
    end_token: int = -1
    aborted: bool = False
    key: bytes | None = None
    body: bytes | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """New messages with their texts, for the journal only."""


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
    max_new_tokens: int | None
    """What the limits leave; None: no limit."""


class StoredTurn(Protocol):
    """A finished turn in the ledger."""

    @property
    def turn(self) -> int: ...

    @property
    def parent(self) -> int:
        """-1: a root."""
        ...

    @property
    def shared(self) -> int:
        """First tokens of the prompt that are the parent's sequence."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def spans(self) -> list[tuple[str, int]]:
        """(weight version, index of the first sampled token under it)."""
        ...

    @property
    def finish(self) -> tuple[str, str | int | None]: ...

    @property
    def calls(self) -> bytes | None:
        """JSON: list of {"id", "name", "arguments"}."""
        ...

    @property
    def delivered(self) -> bool: ...

    @property
    def child(self) -> str | None:
        """Name of the child conversation that the turn belongs to."""
        ...

    @property
    def rid(self) -> str: ...

    def prompt_ids(self) -> list[int]:
        """Return the whole prompt."""
        ...

    def output_ids(self) -> list[int]: ...

    def output_logprobs(self) -> list[float]: ...


class Ledger(Protocol):
    """One server's sessions. All methods run on the loop of the TokenizerManager, and none blocks it."""

    def view(self, caller: SessionCaller, previous: str | None = None) -> SessionView:
        """Raises SessionEndedError, SessionLimitError, SessionUnavailableError or SessionNotFoundError."""
        ...

    def sequence(self, session_id: str, turn: int, kept: int | None = None) -> bytes:
        """Return the int32 ids of prompt and output of a turn, or the first `kept` of them."""
        ...

    def begin(self, caller: SessionCaller, next: NextTurn, key: bytes | None, body: bytes) -> OpenTurn:
        """Reserve a turn. Each call needs a `commit` or a `cancel`. A root beside other roots opens a child session."""
        ...

    async def commit(self, turn: OpenTurn, finished: FinishedTurn) -> None:
        """Append the turn, and return when it is durable by policy. Raises SessionUnavailableError otherwise."""
        ...

    def cancel(self, turn: OpenTurn) -> None:
        """Drop a turn that sampled nothing."""
        ...

    def delivered(self, session_id: str, turn: int) -> None:
        """Note that the whole reply reached the client's socket."""
        ...

    def replay(self, caller: SessionCaller, key: bytes, body: bytes) -> StoredTurn | None:
        """Return the finished turn of this idempotency key. Raises IdempotencyConflictError for another body."""
        ...

    def described(self, turn: OpenTurn, next: NextTurn) -> dict[str, Any]:
        """Return `meta_info.session`."""
        ...
