"""`EnvDoor`: the access control of an environment server, which runs before any route or WebSocket.

`env_server.create_env_app` wraps its routes with it. It refuses paths with control characters, requests that only a web
page of another origin sends, and, if the server has a key, requests without the key. `/health` is open. The rollout
server has the same rules.
"""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import BadRequestError
from verl_server.web.addresses import is_loopback
from verl_server.web.keys import is_one_of, key_needed, sent_keys
from verl_server.web.origins import page_refusal
from verl_server.web.resolver import has_control_character


def check_address(host: str, api_key: str | None, allow_unauthenticated: bool) -> None:
    """Raise BadRequestError if anyone in the network could play on a server that listens on `host`."""
    if not (is_loopback(host) or api_key or allow_unauthenticated):
        raise BadRequestError(
            f"Refusing to bind {host} without a key: anyone who can connect could run the environment's code. Set "
            "VERL_ENV_API_KEY or --api-key-file, or --allow-unauthenticated if you trust the network."
        )


class EnvDoor:
    """`host` is the address on which the server listens. Without `api_key`, no key is needed."""

    def __init__(self, app: ASGIApp, host: str, api_key: str | None) -> None:
        self._app, self._host = app, host
        self._keys = [] if api_key is None else [api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refusal(scope, receive, send)
        else:
            await receive()
            head = {"status": refusal.status_code, "headers": refusal.raw_headers}
            await send({"type": "websocket.http.response.start"} | head)
            await send({"type": "websocket.http.response.body", "body": refusal.body})

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if has_control_character(path):
            return _refused(400, "The path of the URL has a control character.")
        if path == "/health":
            return None
        sent = sent_keys(scope)
        if self._keys and not is_one_of(sent, self._keys):
            needed = key_needed(f"{scope.get('method', 'WebSocket')} {path}", ["key (VERL_ENV_API_KEY)"], sent)
            return _refused(401, needed, {"WWW-Authenticate": "Bearer"})
        found = page_refusal(scope, self._host)
        return None if found is None else _refused(found.status, found.message)


def _refused(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps({"detail": message}), status, headers, media_type="application/json")
