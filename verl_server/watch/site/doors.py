"""`WatchDoor`: the access control of the page's server, which runs before any route, and the headers of each answer.

Requests that only a web page of another origin sends are refused, as the rollout server refuses them; except that a
link may lead to the page itself. With a key, everything under /api needs it. The page and its scripts are public.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.errors import BadRequestError
from verl_server.watch.site.json_answers import error_response
from verl_server.web.addresses import is_loopback
from verl_server.web.first_headers import first_headers
from verl_server.web.keys import is_one_of, key_needed, sent_keys
from verl_server.web.origins import PageRefusal, page_refusal
from verl_server.web.resolver import has_control_character

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    b"content-security-policy": CONTENT_POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}


def check_address(host: str, api_key: str | None) -> None:
    """Raise BadRequestError if anyone in the network could read the runs of a server that listens on `host`."""
    if not (is_loopback(host) or api_key):
        raise BadRequestError(
            f"Refusing to bind {host} without a key: anyone who can connect could read the runs. Set "
            "VERL_SERVER_API_KEY or --api-key-file, or leave --host out and use a tunnel (ssh -L)."
        )


class WatchDoor:
    """`host` is the address on which the server listens. Without `api_key`, no key is needed."""

    def __init__(self, app: ASGIApp, host: str, api_key: str | None) -> None:
        self._app, self._host = app, host
        self._keys = [] if api_key is None else [api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with_headers = _adding(send, is_api=scope["path"].startswith("/api"))
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, with_headers)
            return
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        remedy = "Open the page as #key=KEY, or enter the key there." if refusal.status == 401 else ""
        await error_response(refusal.status, refusal.message, remedy, headers)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> PageRefusal | None:
        path: str = scope["path"]
        if has_control_character(path):
            return PageRefusal(400, "The path of the URL has a control character.")
        if (found := page_refusal(_as_asked(scope), self._host)) is not None:
            return found
        sent = sent_keys(scope)
        if self._keys and path.startswith("/api") and not is_one_of(sent, self._keys):
            return PageRefusal(401, key_needed(f"{scope['method']} {path}", ["key"], sent))
        return None


def _as_asked(scope: Scope) -> Scope:
    """Return the request for the check of its origin.

    A navigation to the page counts as one that a person typed: whoever sent it does not see the answer, and what the
    page loads then is of its own origin. The check of the Host stays.
    """
    headers = first_headers(scope)
    is_link = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD") or not is_link:
        return scope
    kept = [(name, value) for name, value in scope["headers"] if name not in (b"sec-fetch-site", b"origin")]
    return {**scope, "headers": kept}


def _adding(send: Send, *, is_api: bool) -> Send:
    """Return `send` with the headers of every answer."""
    caching = {b"cache-control": b"no-store" if is_api else b"no-cache"}

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            changed: MutableMapping[str, Any] = dict(message)
            changed["headers"] = [*message.get("headers", ()), *(_HEADERS | caching).items()]
            message = changed
        await send(message)

    return add
