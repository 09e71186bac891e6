"""`Arrivals`: aborts that reach requests between their arrival and their hand-over to the scheduler.

A request is read, rendered and tokenized before the scheduler has it. For many long chats at once this takes seconds.
An abort during this time names requests that the scheduler cannot find yet. So the arrival of each request has a
number, and each abort records the last number that it concerns. The TokenizerManager compares both numbers at the
hand-over. Used on the event loop only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.server.http.routing import route_of
from verl_server.web.resolver import Found

_NUMBER: ContextVar[int | None] = ContextVar("arrival", default=None)
"""Number of the arrival of the request that this task serves."""
_MOST_NAMES = 65536
"""The most names of aborts that are kept. If there are more, the oldest names are dropped."""


class Arrivals:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0
        self._open: set[int] = set()
        self._all_until = 0
        """All requests up to this number were aborted."""
        self._until: dict[int, int] = {}
        """Hash of a rid -> number. Requests with this rid up to this number were aborted.

        A hash is kept because rids may be long.
        """

    @contextmanager
    def arrive(self) -> Iterator[None]:
        """Record that the request of this task has arrived. An inner call is part of the same request."""
        if _NUMBER.get() is not None:
            yield
            return
        number = self._last = next(self._numbers)
        self._open.add(number)
        token = _NUMBER.set(number)
        try:
            yield
        finally:
            _NUMBER.reset(token)
            self._leave(number)

    def hand_over(self, rids: set[str]) -> set[str]:
        """Return those of `rids` that were aborted since this task's request arrived.

        Later aborts find the request in the scheduler.
        """
        number = _NUMBER.get()
        if number is None or number not in self._open:
            return set()
        aborted = {rid for rid in rids if number <= max(self._all_until, self._until.get(hash(rid), 0))}
        self._leave(number)
        return aborted

    def abort_all(self) -> None:
        self._all_until = self._last

    def abort(self, rid: str) -> None:
        if self._open:
            self._until.pop(hash(rid), None)  # the newest names are the last ones
            self._until[hash(rid)] = self._last
            if len(self._until) > _MOST_NAMES:
                del self._until[next(iter(self._until))]

    def _leave(self, number: int) -> None:
        self._open.discard(number)
        if not self._open:
            self._until.clear()


class ArrivalMiddleware:
    """Records the arrival of each request to generate."""

    def __init__(self, app: ASGIApp, arrivals: Arrivals) -> None:
        self._app, self._arrivals = app, arrivals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if not isinstance(route, Found) or not route.operation.in_session:
            await self._app(scope, receive, send)
            return
        with self._arrivals.arrive():
            await self._app(scope, receive, send)
