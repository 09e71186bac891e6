"""Bounds on all sessions together, and checks of one session's limits.

The ledgers call the checks before each change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from verl_server.errors import BadRequestError, ContextLengthError, SessionBusyError, SessionLimitError
from verl_server.messages.session_types import CreateSession, RewardBody
from verl_server.sampling_params import SamplingParams
from verl_server.server.sessions.session import Session

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_METADATA_BYTES = 16 * 1024
_SAMPLING_BYTES = 256 * 1024
_TEXT = 1024
"""The most characters of a group, of the name of a reward, and of the reason of an end."""
_REWARDS = 16384
"""Largest number of rewards of a session. All rewards of a session are summed whenever a reward is recorded."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of all sessions together."""

    memory_bytes: int = 2 * 2**30
    ttl: float = 3600.0
    """Seconds without a request after which an open session expires."""
    retention: float = 600.0
    """Seconds that a finished session is kept after its trajectory was read. A session that was never read is kept for
    a day."""
    max_sessions: int = 65536
    max_turn_tokens: int | None = None
    """The most tokens of a sequence. None: the model's context."""
    max_nodes: int = 16384
    session_bytes: int = 64 * 2**20
    """The most bytes of one session with its children, so that one agent cannot fill the memory of all sessions."""
    max_children: int = 64


def check_text(name: str, text: str) -> None:
    """Raise BadRequestError for a text that is too long to be kept with a session."""
    if len(text) > _TEXT:
        raise BadRequestError(f"{name} has more than {_TEXT} characters.")


def check_reward(session: Session, body: RewardBody) -> None:
    """Raise BadRequestError for a reward that a session cannot have."""
    check_text("reward.name", body.name)
    if body.turn is not None and (not 0 <= body.turn < len(session.turns) or session.turns[body.turn] is None):
        raise BadRequestError(f"reward.turn: session {session.id} has no finished turn {body.turn}.")
    if len(session.rewards) >= _REWARDS and (body.turn, body.name) not in session.rewards:
        raise BadRequestError(f"Session {session.id} has {_REWARDS} rewards, and can have no more.")


def check_new(body: CreateSession) -> None:
    """Raise BadRequestError for a value that no session can have."""
    if body.id is not None and _ID.fullmatch(body.id) is None:
        raise BadRequestError("id must be 1 to 128 letters, digits, '_' or '-'.")
    if len(msgspec.json.encode(body.metadata)) > _METADATA_BYTES:
        raise BadRequestError(f"metadata has more than {_METADATA_BYTES} bytes of JSON.")
    if len(msgspec.json.encode([body.sampling_params, body.forced_sampling_params])) > _SAMPLING_BYTES:
        raise BadRequestError(
            f"sampling_params and forced_sampling_params have more than {_SAMPLING_BYTES} bytes of JSON."
        )
    for name in ("sampling_params", "forced_sampling_params"):
        _check_sampling(name, getattr(body, name))
    check_text("group", body.group)
    for name in body.limits.__struct_fields__:
        value = getattr(body.limits, name)
        if value is not None and not value > 0:
            raise BadRequestError(f"limits.{name} must be greater than 0, not {value}.")


def _check_sampling(name: str, given: Mapping[str, Any]) -> None:
    """Raise BadRequestError for parameters with which each request of the session would be refused."""
    try:
        # Requests set their own lengths: one that is missing here refuses nothing.
        params = SamplingParams.parse({"max_new_tokens": None} | {k: v for k, v in given.items() if v is not None})
    except BadRequestError as error:
        raise BadRequestError(f"{name}: {error}") from None
    if params.n != 1:
        raise BadRequestError(f"{name}.n must be 1: a request asks for its samples.")


def check_samples(session: Session, count: int) -> None:
    """Raise SessionLimitError if `count` turns that begin together can never begin in the session."""
    limits = session.limits
    if count > limits.max_concurrent:
        raise SessionLimitError(
            f"n={count} samples run at once, and session {session.id} has max_concurrent={limits.max_concurrent}."
        )
    if limits.max_turns is not None and session.started < limits.max_turns < session.started + count:
        session.limit = "max_turns"
        raise SessionLimitError(
            f"n={count} samples are {count} turns, and session {session.id} has used {session.started} of its "
            f"max_turns={limits.max_turns}."
        )


def check_turn(session: Session) -> None:
    """Raise SessionLimitError if the session has no turn left, or SessionBusyError if too many run now."""
    limits = session.limits
    if limits.max_turns is not None and session.started >= limits.max_turns:
        session.limit = "max_turns"
        raise SessionLimitError(f"Session {session.id} has used its max_turns={limits.max_turns}.")
    if limits.max_tokens is not None and session.sampled >= limits.max_tokens:
        session.limit = "max_tokens"
        raise SessionLimitError(f"Session {session.id} has used its max_tokens={limits.max_tokens}.")
    if session.in_flight >= limits.max_concurrent:
        raise SessionBusyError(
            f"Session {session.id} has max_concurrent={limits.max_concurrent} generations running. Retry later."
        )


def room(session: Session, bounds: Bounds, tokens: int) -> int | None:
    """Return the number of tokens that may be sampled after a prompt of `tokens` tokens. None: no limit.

    Turns that run at the same time each get the full number. Raise ContextLengthError if no token may be sampled.
    """
    limits, rooms = session.limits, []
    contexts = {
        "max_session_turn_tokens": bounds.max_turn_tokens,
        f"max_context of the session {session.id}": limits.max_context,
    }
    for setting, most in contexts.items():
        if most is not None:
            if tokens >= most:
                raise ContextLengthError.of(tokens, 0, most, setting)
            rooms.append(most - tokens)
    if limits.max_tokens is not None:
        rooms.append(limits.max_tokens - session.sampled)
    return min(rooms) if rooms else None
