"""Who may call what: ASGI middleware with SGLang's rules for `api_key` and `admin_api_key`.

Keys travel as `Authorization: Bearer KEY`. Control routes (weights, memory, abort, pause, flush) ask for the
admin key where one is set, and then the plain key does not open them.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.server.responses import json_response

_OPEN_PREFIXES = ("/health", "/ready", "/metrics", "/ping")


class AuthMiddleware:
    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None, admin_paths: set[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self._app(scope, receive, send)
        else:
            response = json_response({"error": "Unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if scope["method"] == "OPTIONS" or path.startswith(_OPEN_PREFIXES):
            return True
        needed = self._api_key
        if path.rstrip("/") in self._admin_paths and self._admin_api_key is not None:
            needed = self._admin_api_key
        return needed is None or _bearer_matches(scope, needed)


def _bearer_matches(scope: Scope, key: str) -> bool:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())
    return False
