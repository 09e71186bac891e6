"""`RouteMiddleware` resolves each request once, and `Dispatch` calls the handler that was found.

`app.create_app` puts the middlewares between both. They read the route with `route_of`; none of them parses a path.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import VerlServerError
from verl_server.server.http.operation import Operation
from verl_server.server.http.responses import error_object, json_response
from verl_server.web.resolver import Found, NotServed, Resolver

Route = Found[Operation] | NotServed
_STATE = "route"
"""Name in `scope["state"]` of the route of a request."""


def route_of(scope: Scope) -> Route:
    """Return the route that `RouteMiddleware` found."""
    route: Route = scope["state"][_STATE]
    return route


class RouteMiddleware:
    """Sets the route of each request. Only HTTP passes: there is no WebSocket to be guarded."""

    def __init__(self, app: ASGIApp, resolver: Resolver[Operation]) -> None:
        self._app, self._resolver = app, resolver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_protocol(scope, receive, send)
            return
        route = self._resolver.find(scope["method"], scope["path"])
        scope.setdefault("state", {})[_STATE] = route
        app = _refused(route) if isinstance(route, NotServed) and route.status == 400 else self._app
        await app(scope, receive, send)


class Dispatch:
    """The innermost application: calls the handler, or answers that nothing serves the request.

    The operation converts the errors of its handler into answers.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if isinstance(route, NotServed):
            await _refused(route)(scope, receive, send)
            return
        scope["path_params"] = route.parameters
        operation = route.operation
        try:
            response = await operation.handler(Request(scope, receive, send))
        except VerlServerError as error:
            response = operation.answer_error(error)
        await response(scope, receive, send)


def _refused(route: NotServed) -> ASGIApp:
    headers = {"Allow": ", ".join(route.allowed)} if route.allowed else None
    return json_response(error_object(route.message, route.status, str(route.status)), route.status, headers)


async def _refuse_protocol(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
    while scope["type"] == "lifespan":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
