"""SGLang's `open_session` and `close_session`: the same sessions under SGLang's wire."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server.errors import BadRequestError, SessionExistsError, VerlServerError
from verl_server.server.dialects.operation import BOTH, Operation
from verl_server.server.json_body import parse_json
from verl_server.server.responses import json_response, message_error, read_body
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.session_types import CreateSession, SessionLimits

T = TypeVar("T", bound=msgspec.Struct)

_CAPACITY = "sessions are bounded by the server's settings"


class OpenSessionReq(msgspec.Struct, frozen=True):
    """Body of `/open_session`."""

    session_id: str | None = None
    """Default: a random id."""
    timeout: float | None = None
    """Seconds after which the session expires."""


class CloseSessionReq(msgspec.Struct, frozen=True):
    """Body of `/close_session`."""

    session_id: str
    """The session to delete."""


class SglangSessionApi:
    def __init__(self, ledger: SessionLedger, max_request_bytes: int) -> None:
        self._ledger, self._limit = ledger, max_request_bytes

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "/open_session",
                self.open_session,
                BOTH,
                owner=True,
                body=OpenSessionReq,
                without_effect={
                    "capacity_of_str_len": _CAPACITY,
                    "streaming": "a session is continued in the same way with and without it",
                },
            ),
            Operation("/close_session", self.close_session, BOTH, owner=True, body=CloseSessionReq),
        ]

    async def open_session(self, request: Request) -> Response:
        """Return the id of a new session as a JSON string. 400 if a session has the id already."""
        try:
            body = await self._body(request, OpenSessionReq)
            limits = SessionLimits(seconds=body.timeout)
            session, _ = self._ledger.create(CreateSession(id=body.session_id, limits=limits))
            await self._ledger.store.flushed()
        except SessionExistsError as error:
            return message_error(BadRequestError(str(error)))
        except VerlServerError as error:
            return message_error(error)
        return json_response(session.id)

    async def close_session(self, request: Request) -> Response:
        """Delete a session. Return 200 with an empty body."""
        try:
            self._ledger.delete((await self._body(request, CloseSessionReq)).session_id)
            await self._ledger.store.flushed()
        except VerlServerError as error:
            return message_error(error)
        return Response()

    async def _body(self, request: Request, kind: type[T]) -> T:
        given = parse_json(await read_body(request, self._limit))
        if isinstance(given, dict):
            given = {name: value for name, value in given.items() if value is not None}
        try:
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{request.url.path}: {error}".replace("`$.", "`")) from None
