"""Access control: SGLang's rules for `api_key` and `admin_api_key`, and protection against requests from web pages.

A client sends a key as `Authorization: Bearer KEY` or, as Anthropic's clients do, as `x-api-key: KEY`. If an admin key
is set, control routes (weights, memory, pause, flush) require it and refuse the plain key. Every route accepts the
admin key.

A browser on the server's host can reach a server that is bound to loopback, and any web page can make the browser send
requests: to a host name that the page's owner resolves to 127.0.0.1 (DNS rebinding), or through a form, an image or a
link. Control routes therefore refuse requests that only a page of another origin sends. Other programs send no such
requests.

A session key permits generation in its own session (`sessions.access`). The routes that create, read and end sessions
need an owner's key, which is either key; they exist only if a key is set.

`app.create_app` wraps all routes in `AuthMiddleware`. The handler of `/abort_request` calls
`AccessRules.control_refusal` itself, because the body decides whether the request is a control call.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import ForbiddenError
from verl_server.server.first_headers import first_headers
from verl_server.server.responses import error_headers, error_object, json_response
from verl_server.server.sessions.access import (
    SessionAccess,
    is_open,
    is_owner_path,
    unauthorized,
    without_owner_key,
)
from verl_server.server.sessions.table import SessionTable
from verl_server.server_args import ServerArgs

_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Content types that a page of another origin can send without a CORS preflight request."""
_FOREIGN_SITES = ("cross-site", "same-site")
"""Values of the header Sec-Fetch-Site in requests from pages of another origin. Two ports of one host are one site."""


class AccessRules:
    """The rules of one server, from its keys and its address.

    Each method returns the response that refuses a request, or None to permit the request.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        self._api_key, self._admin_api_key = server_args.api_key, server_args.admin_api_key
        self._host, self._is_loopback = server_args.host, server_args.is_loopback

    def refusal(self, scope: Scope) -> Response | None:
        """Check a request to a route that affects that request only. If `api_key` is set, either key is sufficient."""
        return None if self._api_key is None or self.is_owner(_sent_keys(scope)) else unauthorized()

    def control_refusal(self, scope: Scope) -> Response | None:
        """Check a request to a route that affects the whole server."""
        key = self._api_key if self._admin_api_key is None else self._admin_api_key
        if key is not None and not _is_one_of(_sent_keys(scope), [key]):
            return unauthorized()
        return self._page_refusal(first_headers(scope), scope["path"])

    def owner_refusal(self, scope: Scope) -> Response | None:
        """Check a request to a session route: it needs a key, also where ordinary routes are open."""
        if not self.owner_keys:
            return without_owner_key()
        if not self.is_owner(_sent_keys(scope)):
            return unauthorized()
        return self._page_refusal(first_headers(scope), scope["path"])

    @property
    def owner_keys(self) -> list[str]:
        """The keys that own sessions."""
        return [key for key in (self._api_key, self._admin_api_key) if key is not None]

    def is_owner(self, sent: list[bytes]) -> bool:
        """Return True if one of the keys that a request has is a key of the server."""
        return _is_one_of(sent, self.owner_keys)

    def _page_refusal(self, headers: dict[bytes, bytes], path: str) -> Response | None:
        """Refuse a request that a web page of another origin may have sent."""
        site = headers.get(b"sec-fetch-site", b"").decode("latin-1").lower()
        if site in _FOREIGN_SITES:
            return _forbidden(f"{path} refuses requests from web pages of another origin (Sec-Fetch-Site: {site}).")
        if not self._is_loopback:
            return None
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
        if host and not _is_own_name(host, self._host):
            return _forbidden(
                f"{path} refuses the Host {host!r}: this server listens on {self._host}, and a web page may have sent "
                "the request. Use localhost or 127.0.0.1 in the URL. A proxy must send one of these names as Host."
            )
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _forbidden(f"{path} refuses requests from web pages of the origin {origin!r}.")
        media_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if media_type in _FORM_TYPES:
            message = f"{path} refuses {media_type}, which web forms send. Set Content-Type: application/json."
            return json_response(error_object(message, 415, "UnsupportedMediaType"), 415)
        return None


class AuthMiddleware:
    """Applies `AccessRules` and the rights of session keys to each HTTP request.

    `control_paths` are the paths of the control routes. A request in a session has `scope["state"]["session"]`.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, control_paths: Collection[str], table: SessionTable) -> None:
        self._app, self._rules, self._control_paths = app, rules, control_paths
        self._sessions = SessionAccess(table, rules.owner_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        sent = _sent_keys(scope)
        found = self._sessions.resolve(scope, sent, self._rules.is_owner(sent))
        path: str = scope["path"]
        if not isinstance(found, bool):
            return found
        if found or scope["method"] == "OPTIONS" or is_open(path):
            return None
        if is_owner_path(path):
            return self._rules.owner_refusal(scope) or self._sessions.starting()
        if path.rstrip("/") in self._control_paths:
            return self._rules.control_refusal(scope)
        return self._rules.refusal(scope)


@functools.lru_cache(maxsize=64)
def _is_own_name(host: str, own: str) -> bool:
    """Return True if a Host header names the loopback interface. `own`: the host on which the server listens."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in ("localhost", own.lower()) or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_one_of(sent: list[bytes], keys: list[str]) -> bool:
    """Return True if one of the sent keys is one of `keys`."""
    return any(hmac.compare_digest(each, key.encode()) for each in sent for key in keys)


def _sent_keys(scope: Scope) -> list[bytes]:
    """Return the keys of both headers, which have the same rights.

    They are bytes: a header is latin-1 text, and compare_digest accepts only ASCII text.
    """
    scheme, _, bearer = first_headers(scope).get(b"authorization", b"").partition(b" ")
    given = [bearer] if scheme.lower() == b"bearer" else []
    given += [value for name, value in scope["headers"] if name == b"x-api-key"]
    return [key.strip() for key in given]


def _forbidden(message: str) -> Response:
    return json_response(error_object(message, 403, "Forbidden"), 403, error_headers(ForbiddenError()))
