"""Headers with which routers and clients choose a server, checked for every route.

`X-Session-ID` and `X-SMG-Routing-Key` choose among servers. If a request has an owner's key, and the owner created a
session with the id in `X-Session-ID`, the request belongs to this session (`sessions/access`). Otherwise `X-Session-ID`
is a hint: from earlier requests with the same id, the prefix cache estimates how long to keep the history. Only the
first 128 characters of the header are read. The fields `session_id` and `conversation_id` of a body are the same hint
for each prompt, and take precedence over the header. `X-SMG-Routing-Key` has no effect at the server.
`X-data-parallel-rank` chooses a data-parallel rank. A server has only rank 0, and refuses another rank (400).
`X-Request-Id` names a request of `/inference/v1/generate`.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import BadRequestError
from verl_server.server.http.routing import error_answer
from verl_server.web.first_headers import first_headers

_RANK_HEADER = "X-data-parallel-rank"


class RoutingHeadersMiddleware:
    """Refuses requests for a data-parallel rank that the server does not have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rank = first_headers(scope).get(_RANK_HEADER.lower().encode()) if scope["type"] == "http" else None
        if rank is None or rank.strip() == b"0":
            await self._app(scope, receive, send)
            return
        shown = rank[:20].decode("latin-1")
        message = f"{_RANK_HEADER}: {shown} is not served: this server has one data-parallel rank, 0."
        await error_answer(scope, BadRequestError(message))(scope, receive, send)
