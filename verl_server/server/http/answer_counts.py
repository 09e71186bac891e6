"""`AnswerCountMiddleware` counts the answers of each route by their status, for `/metrics`.

It is directly behind `RouteMiddleware`, so that refusals of the other middlewares count, too. A label is the route's
path in the table of operations, never the path of a request, of which callers may send any number. Requests that no
operation serves are counted together, without a method.

An error inside a stream comes after the status 200. It is counted as an aborted request.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.server.http.routing import route_of
from verl_server.server.metrics import Metrics
from verl_server.web.resolver import NotServed

NOT_SERVED = "not served"
"""The endpoint of requests that no operation serves."""


class AnswerCountMiddleware:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)

    def _count(self, scope: Scope, status: int) -> None:
        route = route_of(scope)
        if isinstance(route, NotServed):
            self._metrics.answered(NOT_SERVED, "", status)
        else:
            self._metrics.answered(route.operation.path, scope["method"], status)
