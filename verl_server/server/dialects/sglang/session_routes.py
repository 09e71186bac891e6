"""SGLang's `open_session` and `close_session`, which create and delete this server's sessions.

`close_session` also ends a session hint: an id that requests sent, and that is no session of this server.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server.errors import BadRequestError, SessionExistsError, SessionUnavailableError
from verl_server.messages.session_types import CreateSession, SessionLimits
from verl_server.server.http.operation import BOTH, Operation
from verl_server.server.http.responses import json_response
from verl_server.server.http.unknown_fields import read_object
from verl_server.server.sessions.access import owner_of
from verl_server.server.sessions.ledger import SessionLedger

_CAPACITY = "sessions are bounded by the server's settings"


class OpenSessionReq(msgspec.Struct, frozen=True):
    """Body of `/open_session`."""

    session_id: str | None = None
    """Default: a random id."""
    timeout: float | None = None
    """Seconds after which the session expires."""
    streaming: bool = False
    """`streaming` of `CreateSession`."""
    min_weight_version: str | None = None
    """`min_weight_version` of `CreateSession`."""
    exact_weight_version: str | None = None
    """`exact_weight_version` of `CreateSession`."""


class CloseSessionReq(msgspec.Struct, frozen=True):
    """Body of `/close_session`."""

    session_id: str
    """The session to delete, or the hint that ends: `session_id`, `conversation_id` or `X-Session-ID` of requests."""


class SglangSessionApi:
    def __init__(self, ledger: SessionLedger, finish_hint: Callable[[str], None], max_request_bytes: int) -> None:
        """`finish_hint` is called with each session hint when the hint ends."""
        self._ledger, self._finish_hint, self._limit = ledger, finish_hint, max_request_bytes

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "/open_session",
                self.open_session,
                BOTH,
                access="local_owner",
                body=OpenSessionReq,
                without_effect={"capacity_of_str_len": _CAPACITY},
            ),
            Operation(
                "/close_session",
                self.close_session,
                BOTH,
                body=CloseSessionReq,
                media_types=(),
            ),
        ]

    async def open_session(self, request: Request) -> Response:
        """Return the id of a new session as a JSON string. 400 if a session has the id already. On a server without
        keys that listens on loopback, everybody may open a session."""
        body = await read_object(request, OpenSessionReq, self._limit)
        wanted = CreateSession(
            id=body.session_id,
            limits=SessionLimits(seconds=body.timeout),
            streaming=body.streaming,
            min_weight_version=body.min_weight_version,
            exact_weight_version=body.exact_weight_version,
        )
        try:
            session, _ = self._ledger.create(wanted)
        except SessionExistsError as error:
            raise BadRequestError(str(error)) from None
        await self._ledger.store.flushed()
        return json_response(session.id)

    async def close_session(self, request: Request) -> Response:
        """Delete the session, and note that no request continues the session with this hint: the pages of its history
        are evicted first. Return 200 with an empty body, as SGLang does for an unknown id, too. Deleting needs an
        owner's key, or none on a loopback server without keys. Another caller ends the hint only. Send the request
        after the last reply of the session."""
        named = (await read_object(request, CloseSessionReq, self._limit)).session_id
        if owner_of(request.scope) is not None:
            if not self._ledger.table.is_complete:
                raise SessionUnavailableError("The server is starting and reads its session store. Retry later.")
            if named in self._ledger.table:
                self._ledger.delete(named)
                await self._ledger.store.flushed()
        self._finish_hint(named)
        return Response()
