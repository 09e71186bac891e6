"""Sessions for tests: a ledger with a clock that stands, and turns with ids of the test's choice."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from verl_server.chat.history import NODE
from verl_server.chat.session_view import NextTurn, ReplyMessage
from verl_server.messages.session_types import CreateSession
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.session import OpenTurn, SessionCaller
from verl_server.server.sessions.turn import FinishedTurn
from verl_server.server.sessions.turn_ledger import TurnLedger


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def ids(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def caller(session_id: str, child: str | None = None) -> SessionCaller:
    return SessionCaller(session_id, child, False, b"k" * 16)


def created(ledger: SessionLedger, **fields: Any) -> SessionCaller:
    """Create a session, and return its caller."""
    session, _ = ledger.create(CreateSession(**fields))
    return caller(session.id)


def node(text: str, role: int = 2) -> bytes:
    return NODE.pack(-1, -1, role, b"", blake2b(text.encode(), digest_size=16).digest(), bytes(8), 0, 0)


def plan(added: Sequence[int], parent: int = -1, kept: int = 0, **fields: Any) -> NextTurn:
    values: dict[str, Any] = {
        "generation_prompt": 1,
        "new_nodes": b"",
        "after_node": -1,
        "matched_messages": 0,
        "began": "root" if parent < 0 else None,
        "options": b"o" * 16,
    }
    return NextTurn(parent=parent, kept=kept, added=ids(added), **(values | fields))


def finished(next: NextTurn, output: Sequence[int], **fields: Any) -> FinishedTurn:
    text = " ".join(map(str, output))
    digest = blake2b(text.encode(), digest_size=16).digest()
    values: dict[str, Any] = {
        "logprobs": floats([-0.5] * len(output)),
        "spans": [("v1", 0)],
        "finish": ("stop", output[-1] if output else None),
        "reply": ReplyMessage(digest, bytes(8), [], False, text, content=text),
        "times": (1.0, 2.0, 3.0),
        "dialect": "chat",
        "rid": "rid",
        "end_token": output[-1] if output else -1,
    }
    return FinishedTurn(next=next, output=ids(output), **(values | fields))


async def turn(
    ledger: SessionLedger, who: SessionCaller, next: NextTurn, output: Sequence[int], **fields: Any
) -> OpenTurn:
    """Begin a turn and commit it."""
    opened = TurnLedger(ledger).begin(who, next, fields.get("key"), fields.get("body") or b"b" * 16)
    await TurnLedger(ledger).commit(opened, finished(next, output, **fields))
    return opened
