"""Reads a request in a session: jobs of text workers whose input is the body and a view of the session.

`in_session` converts a dialect's job into such a job. The dialect's job runs unchanged, with `TextTools` that have the
view. Where the job would build a prompt, `session_prompt` plans the session's next turn instead.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from verl_server.chat.session_view import ReplyFacts, SessionView
from verl_server.server.sessions.session import Session
from verl_server.server.text.text_tools import Job, TextTools

R = TypeVar("R")


_ARRAY = b"\xdd"
"""msgpack: an array whose length is the next four bytes."""
_REPLIES = msgspec.msgpack.Decoder(list[ReplyFacts])


class StoredView(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of a session in its encoded form. The ledger only copies bytes, and the text worker decodes them."""

    nodes: bytes
    facts: bytes
    """The `ReplyFacts` of the turns as concatenated msgpack."""
    count: int
    """Number of entries in `facts`."""
    history: Literal["stored", "template"]
    end_tokens: list[int]
    previous: int | None = None

    def decoded(self) -> SessionView:
        replies = _REPLIES.decode(_ARRAY + self.count.to_bytes(4, "big") + self.facts)
        return SessionView(self.history, self.nodes, replies, self.end_tokens, self.previous)


def stored_view(
    session: Session | None, history: Literal["stored", "template"], end_tokens: list[int], previous: int | None
) -> StoredView:
    """Return the snapshot of a session. None stands for a session without turns."""
    if session is None:
        return StoredView(b"", b"", 0, history, end_tokens, previous)
    nodes, facts = bytes(session.nodes.data), bytes(session.facts)
    return StoredView(nodes, facts, session.finished, history, end_tokens, previous)


class SessionBody(msgspec.Struct, frozen=True):
    """Body of a job in a session."""

    view: StoredView
    body: bytes
    """The body of the request."""


def in_session(job: Job[R]) -> Job[R]:
    """Return the job that reads requests of sessions. Its body is `session_body(view, body)`."""

    def run(tools: TextTools, packed: bytes) -> R:
        given = msgspec.msgpack.decode(packed, type=SessionBody)
        return job.run(tools.with_session(given.view.decoded()), given.body)

    return Job(f"session/{job.name}", run, job.result)


def session_body(view: StoredView, body: bytes) -> bytes:
    return msgspec.msgpack.encode(SessionBody(view, body))
