"""`RouteMiddleware` resolves each request once, and `Dispatch` calls the handler that was found.

`app.create_app` puts the middlewares between both. They read the route with `route_of`; none of them parses a path.
What they refuse is answered by `error_answer`, in the shape of the dialect to which the path belongs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import VerlServerError
from verl_server.server.http.operation import AnswerError, Operation
from verl_server.server.http.responses import NotServedError, error_response
from verl_server.web.resolver import Found, NotServed, Resolver

Route = Found[Operation] | NotServed
_STATE = "route"
"""Name in `scope["state"]` of the route of a request."""
_SHAPE = "answer_error"
"""Name in `scope["state"]` of the function that answers the errors of a request that no operation serves."""


def route_of(scope: Scope) -> Route:
    """Return the route that `RouteMiddleware` found."""
    route: Route = scope["state"][_STATE]
    return route


def error_answer(scope: Scope, error: VerlServerError) -> Response:
    """Return the answer to an error, in the shape of the dialect to which the request's path belongs.

    Where dialects share the path, and where nobody serves it, a header may name the dialect (`Operation.shared_with`).
    """
    route = route_of(scope)
    if isinstance(route, NotServed):
        answer: AnswerError = scope["state"][_SHAPE]
    else:
        answer = _named(scope, route.operation.shared_with) or route.operation.answer_error
    return answer(error)


def _named(scope: Scope, shapes: Mapping[str, AnswerError]) -> AnswerError | None:
    headers = Headers(scope=scope)
    return next((shape for header, shape in shapes.items() if header in headers), None)


class RouteMiddleware:
    """Sets the route of each request. Only HTTP passes: there is no WebSocket to be guarded."""

    def __init__(self, app: ASGIApp, operations: Collection[Operation]) -> None:
        self._app, self._resolver = app, Resolver(operations)
        self._shapes = _Shapes(operations)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_protocol(scope, receive, send)
            return
        route = self._resolver.find(scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state[_STATE] = route
        if isinstance(route, NotServed):
            state[_SHAPE] = self._shapes.of(scope)
        await self._app(scope, receive, send)


class _Shapes:
    """The shapes of errors for paths that no operation serves."""

    def __init__(self, operations: Collection[Operation]) -> None:
        self._paths = [(path.split("/")[1:], operation) for operation in operations for path in operation.paths]
        self._named = {header: shape for each in operations for header, shape in each.shared_with.items()}

    def of(self, scope: Scope) -> AnswerError:
        """Return the shape that a header of the request names. Without one, return the shape of the dialect with the
        most paths among those that share the most leading parts with the request's path, and SGLang's if no path shares
        a part with it."""
        named = _named(scope, self._named)
        if named is not None:
            return named
        parts = scope["path"].split("/")[1:]
        shared = [_shared_parts(parts, known) for known, _ in self._paths]
        most = max(shared, default=0)
        if most == 0:
            return error_response
        near = [operation for count, (_, operation) in zip(shared, self._paths, strict=True) if count == most]
        ((dialect, _),) = Counter(operation.dialect for operation in near).most_common(1)
        return next(operation.answer_error for operation in near if operation.dialect == dialect)


def _shared_parts(parts: list[str], known: list[str]) -> int:
    """Return the number of leading parts of a path that a known path has, too."""
    count = 0
    for part, pattern in zip(parts, known, strict=False):
        if part != pattern and not (part and pattern.startswith("{")):
            break
        count += bool(part)  # the root has one part, which is empty
    return count


class Dispatch:
    """The innermost application: calls the handler, or answers that no route serves the request.

    The operation converts the errors of its handler into answers.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if isinstance(route, NotServed):
            await error_answer(scope, not_served(route))(scope, receive, send)
            return
        scope["path_params"] = route.parameters
        operation = route.operation
        try:
            response = await operation.handler(Request(scope, receive, send))
        except VerlServerError as error:
            response = error_answer(scope, error)
        await response(scope, receive, send)


def not_served(route: NotServed) -> NotServedError:
    """Return the error of a request that no operation serves."""
    return NotServedError(route.status, route.message, route.allowed)


async def _refuse_protocol(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
    while scope["type"] == "lifespan":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
