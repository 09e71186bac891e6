"""`create_watch_app`: the routes of the page's server. `server` runs it, `export` asks it for the answers of a page.

Every view reads files and databases in a thread, a few at a time, so that the event loop stays free.
"""

from __future__ import annotations

import logging
from functools import partial

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from verl_server.errors import VerlServerError
from verl_server.watch.site.json_answers import error_response, json_response
from verl_server.watch.site.live import LiveStreams
from verl_server.watch.site.page_errors import PageError
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import OpenRuns
from verl_server.watch.site.static_files import StaticFiles
from verl_server.watch.site.views import Views

logger = logging.getLogger(__name__)

_AT_ONCE = 4
"""Most views that work at one time, and as many searches: a search takes a second."""
_STREAMS = 100
"""Most live streams at one time."""


class WatchRoutes:
    """The routes about `runs`. Use it on the event loop's thread."""

    def __init__(self, runs: OpenRuns, streams: LiveStreams) -> None:
        self._views, self._streams = Views(runs), streams
        self._static = StaticFiles()
        self._readers, self._searches = anyio.CapacityLimiter(_AT_ONCE), anyio.CapacityLimiter(_AT_ONCE)

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/static/{name:path}", self._file),
            Route("/api/live", self._live),
            Route("/api/{path:path}", self._answer),
        ]

    async def _page(self, request: Request) -> Response:
        return self._static.response("index.html")

    async def _file(self, request: Request) -> Response:
        return self._static.response(request.path_params["name"])

    async def _live(self, request: Request) -> Response:
        if self._streams.open >= _STREAMS:
            return error_response(503, f"{_STREAMS} pages follow these runs already.", "Close some of them.")
        return StreamingResponse(self._streams.events(), media_type="text/event-stream")

    async def _answer(self, request: Request) -> Response:
        query = Query(request.query_params.multi_items())
        limiter = self._searches if "q" in request.query_params else self._readers
        view = partial(self._views.answer, request.path_params["path"], query)
        return json_response(await anyio.to_thread.run_sync(view, limiter=limiter))


def create_watch_app(runs: OpenRuns, streams: LiveStreams) -> Starlette:
    """Return the application, without its door."""
    handlers = {VerlServerError: _on_error, HTTPException: _on_http_error, Exception: _on_crash}
    return Starlette(routes=WatchRoutes(runs, streams).routes(), exception_handlers=handlers)  # type: ignore[arg-type]


async def _on_error(request: Request, error: VerlServerError) -> Response:
    remedy = error.remedy if isinstance(error, PageError) else ""
    return error_response(error.status_code, str(error), remedy)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    remedy = "The page's server only reads: GET." if error.status_code == 405 else "The page is at /."
    return error_response(error.status_code, f"{error.detail}: {request.method} {request.url.path}", remedy)


async def _on_crash(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed.", request.method, request.url.path, exc_info=error)
    return error_response(500, f"Internal error in {request.url.path}: {error!r}", "The server's output has more.")
