"""`Operation`: one route of a dialect, with everything that its request and its answer may hold.

The API class of each dialect returns its operations. `app.create_app` mounts them. `/openapi.json`, the reference in
docs/ and the test that sends every field read the same table. A known field of a body is in exactly one of three
places: in the struct (implemented), in `refused`, or in `without_effect`. Other fields are ignored and counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]

JSON = "application/json"
TEXT = "text/plain"
EVENTS = "text/event-stream"
GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")


@dataclass(frozen=True)
class Operation:
    """A handler, the paths and methods that it serves, and the description of its requests and answers."""

    path: str
    handler: Handler
    """The docstring of the handler describes the answer."""
    methods: tuple[str, ...] = GET
    aliases: tuple[str, ...] = ()
    """Other paths of the same handler, for example names of older versions."""
    control: bool = False
    """True for a route that affects the whole server. If an admin key is set, the route requires it."""
    owner: bool = False
    """True for a session route, which needs a key of the server, also where ordinary routes are open."""
    body: type[msgspec.Struct] | None = None
    """Struct of the JSON body. Its fields are implemented, except for `id` of a control request, which is internal."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Known field that is not implemented -> what to do instead. A request that sets the field is answered 400."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Known field that is accepted and changes nothing -> why nothing is lost."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Name of a query parameter -> its meaning."""
    answer: Any = None
    """Type of the JSON answer with status 200. None: the docstring of the handler says what the answer holds."""
    media_types: tuple[str, ...] = (JSON,)
    """Content types of the answer with status 200."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the implemented fields of the body. A message between processes has an `id` that is internal."""
        if self.body is None:
            return ()
        is_internal = self.body.__struct_config__.tag is not None
        return tuple(name for name in self.body.__struct_fields__ if name != "id" or not is_internal)

    def routes(self) -> list[Route]:
        return [Route(path, self.handler, methods=list(self.methods)) for path in self.paths]


def exact_first(routes: Sequence[Route]) -> list[BaseRoute]:
    """Return `routes` with a table of all paths without parameters before them.

    Starlette compares a path with one route after the other, which takes 0.1 ms for a hundred routes.
    """
    return [_ExactRoutes(routes), *routes]


class _ExactRoutes(BaseRoute):
    """A table of routes by method and path. What it does not find is left to the routes behind it."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        for exact in (route for route in routes if "{" not in route.path):
            for method in exact.methods or ():
                # The first route that matches serves the path, as without the table.
                found = (r for r in routes if method in (r.methods or ()) and r.path_regex.match(exact.path))
                self._routes[method, exact.path] = next(found)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        route = self._find(scope)
        return (Match.NONE, {}) if route is None else route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._find(scope)
        assert route is not None
        scope["route"] = route
        await route.handle(scope, receive, send)

    def _find(self, scope: Scope) -> Route | None:
        return self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
