"""`VersionHeadersMiddleware` reads demands on the weight version, and names the served version in answers.

It concerns the operations that generate. The headers `X-Verl-Min-Weight-Version` and `X-Verl-Exact-Weight-Version`
state the demand of a request whose body states none (`version_demand`). The dialects read it with `demand_of`. Every
answer has the header `X-Verl-Weight-Version`: the version that the server serves when the answer starts, also if the
answer is an error, or an earlier answer that is sent again. A label may be any text, so characters that are no visible
ASCII, and "%", are percent-encoded in all three headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.errors import BadRequestError
from verl_server.server.http.routing import error_answer, route_of
from verl_server.version_demand import EXACT_HEADER, MIN_HEADER, VERSION_HEADER, read_demand
from verl_server.web.first_headers import first_headers
from verl_server.web.resolver import NotServed

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_STATE = "weight_demand"
"""Name in `scope["state"]` of the demand in the headers."""


def demand_of(scope: Scope) -> str:
    """Return the demand in the headers of a request, or ""."""
    demand: str = scope.get("state", {}).get(_STATE, "")
    return demand


class VersionHeadersMiddleware:
    def __init__(self, app: ASGIApp, weight_version: Callable[[], str]) -> None:
        """`weight_version` returns the label of the served weights."""
        self._app, self._weight_version = app, weight_version
        self._name = VERSION_HEADER.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if isinstance(route, NotServed) or not route.operation.generates:
            await self._app(scope, receive, send)
            return

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = self._name, quote(self._weight_version(), _VISIBLE, errors="replace").encode()
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        app = self._app
        try:
            if demand := _stated(first_headers(scope)):
                scope.setdefault("state", {})[_STATE] = demand
        except BadRequestError as error:
            app = error_answer(scope, error)
        await app(scope, receive, send_with_version)


def _stated(headers: Mapping[bytes, bytes]) -> str:
    """Return the demand that headers state, or "". Raise BadRequestError."""
    values = (headers.get(name.lower().encode()) for name in (MIN_HEADER, EXACT_HEADER))
    minimum, exact = (None if value is None else unquote(value.decode("latin-1")) for value in values)
    return read_demand(minimum, exact, (MIN_HEADER, EXACT_HEADER))
