"""`json_error_handlers`: errors of a Starlette application as JSON, also those that Starlette would answer as text.

The environment server and the gateway of agents use it. The rollout server has a table of operations instead.
"""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

logger = logging.getLogger(__name__)


def json_error_handlers(key: str) -> dict[Any, Any]:
    """Return `exception_handlers` for an application whose errors are {key: message}."""

    def answer(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return Response(orjson.dumps({key: message}), status, headers, media_type="application/json")

    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if "Allow" in headers:
            headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))  # Starlette joins a set
        allowed = f" (it has {headers['Allow']})" if "Allow" in headers else ""
        text = f"{error.detail}: {request.method} {request.url.path}{allowed}"
        return answer(error.status_code, text, headers)

    async def on_crash(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed.", request.method, request.url.path, exc_info=error)
        return answer(500, f"Internal error in {request.url.path}: {error!r} (see the server's log).")

    return {HTTPException: on_http_exception, Exception: on_crash}
