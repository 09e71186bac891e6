"""The reading of a request in a session: the jobs of text workers, with the session's view beside the body.

`in_session` makes such a job of a dialect's own job. The dialect's job runs unchanged, on `TextTools` that hold the
view; where it would make a prompt, `session_prompt` plans the session's next turn instead.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from verl_server.chat.session_view import SessionView
from verl_server.server.text_tools import Job, TextTools

R = TypeVar("R")


class SessionBody(msgspec.Struct, frozen=True):
    """Body of a job in a session."""

    view: SessionView
    body: bytes
    """The body of the request."""


def in_session(job: Job[R]) -> Job[R]:
    """Return the job that reads requests of sessions. Its body is `session_body(view, body)`."""

    def run(tools: TextTools, packed: bytes) -> R:
        given = msgspec.msgpack.decode(packed, type=SessionBody)
        return job.run(tools.with_session(given.view), given.body)

    return Job(f"session/{job.name}", run, job.result)


def session_body(view: SessionView, body: bytes) -> bytes:
    return msgspec.msgpack.encode(SessionBody(view, body))
