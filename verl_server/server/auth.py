"""Access control: SGLang's rules for `api_key` and `admin_api_key`, and protection against requests from web pages.

A client sends a key as `Authorization: Bearer KEY` or, as Anthropic's clients do, as `x-api-key: KEY`. If an admin key
is set, control routes (weights, memory, pause, flush) require it and refuse the plain key. Every route accepts the
admin key. Control routes and session routes refuse requests that only a web page of another origin sends
(`web.origins`). A refusal names the key that is missing and the headers that may carry it (`web.keys`).

A session key permits generation in its own session (`sessions.access`). The routes that create, read and end sessions
need an owner's key, which is either key; they exist only if a key is set. SGLang's sessions (`/open_session`,
`session_params`) need none on a server without keys that listens on loopback.

`app.create_app` puts `AuthMiddleware` behind `RouteMiddleware`, so `Operation.access` of the request's route decides.
The handler of `/abort_request` calls `AccessRules.control_refusal` itself, because the body decides whether the request
is a control call.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import ForbiddenError, UnauthorizedError, VerlServerError
from verl_server.server.http.routing import error_answer, not_served, route_of
from verl_server.server.sessions.access import SessionAccess, without_owner_key
from verl_server.server.sessions.table import SessionTable
from verl_server.server_args import ServerArgs
from verl_server.web.addresses import is_loopback
from verl_server.web.keys import is_one_of, key_needed, sent_keys
from verl_server.web.origins import page_refusal
from verl_server.web.resolver import NotServed

_ONE_KEY, _ADMIN_KEY = "API key (api_key)", "admin key (admin_api_key)"


class FormTypeError(ForbiddenError):
    """A control route was sent a content type that web forms send."""

    status_code = 415


class AccessRules:
    """The rules of one server, from its keys and its address.

    Each method returns the error that refuses a request, or None to permit the request.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        self._api_key, self._admin_api_key = server_args.api_key, server_args.admin_api_key
        self._host = server_args.host

    def refusal(self, scope: Scope) -> VerlServerError | None:
        """Check a request to a route that affects that request only. If `api_key` is set, either key is sufficient."""
        return None if self._api_key is None else self._key_refusal(scope, self.owner_keys)

    def control_refusal(self, scope: Scope) -> VerlServerError | None:
        """Check a request to a route that affects the whole server."""
        key = self._api_key if self._admin_api_key is None else self._admin_api_key
        refusal = None if key is None else self._key_refusal(scope, [key])
        return refusal or self._page_refusal(scope)

    def owner_refusal(self, scope: Scope) -> VerlServerError | None:
        """Check a request to a session route: it needs a key, also where ordinary routes are open."""
        if not self.owner_keys:
            return without_owner_key()
        return self._key_refusal(scope, self.owner_keys) or self._page_refusal(scope)

    def local_owner_refusal(self, scope: Scope) -> VerlServerError | None:
        """Check a request to a route of SGLang's sessions, which is open on loopback where no key is set."""
        return self._page_refusal(scope) if self._is_open_locally else self.owner_refusal(scope)

    def is_local_owner(self, scope: Scope) -> bool:
        """Return True if a request owns SGLang's sessions without a key. One that a web page sent does not."""
        return self._is_open_locally and page_refusal(scope, self._host) is None

    @property
    def _is_open_locally(self) -> bool:
        return not self.owner_keys and is_loopback(self._host)

    @property
    def owner_keys(self) -> list[str]:
        """The keys that own sessions."""
        return [key for key in (self._api_key, self._admin_api_key) if key is not None]

    def is_owner(self, sent: list[bytes]) -> bool:
        """Return True if one of the request's keys is a key of the server."""
        return is_one_of(sent, self.owner_keys)

    def _key_refusal(self, scope: Scope, keys: list[str]) -> UnauthorizedError | None:
        """Refuse a request that has none of `keys`."""
        sent = sent_keys(scope)
        if is_one_of(sent, keys):
            return None
        names = [_ONE_KEY if key == self._api_key else _ADMIN_KEY for key in keys]
        route = f"{scope['method']} {scope['path']}"
        if _ONE_KEY not in names and self._api_key is not None and is_one_of(sent, [self._api_key]):
            return UnauthorizedError(f"{key_needed(route, names, sent)} The API key does not permit it.")
        return UnauthorizedError(key_needed(route, names, sent))

    def _page_refusal(self, scope: Scope) -> VerlServerError | None:
        """Refuse a request that a web page of another origin may have sent."""
        found = page_refusal(scope, self._host)
        if found is None:
            return None
        return FormTypeError(found.message) if found.status == 415 else ForbiddenError(found.message)


class AuthMiddleware:
    """Applies `AccessRules` and the rights of session keys to each request.

    A request in a session has `scope["state"]["session"]`.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, table: SessionTable) -> None:
        self._app, self._rules = app, rules
        self._sessions = SessionAccess(table, rules.owner_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        app = self._app if refusal is None else error_answer(scope, refusal)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> VerlServerError | None:
        route, sent = route_of(scope), sent_keys(scope)
        if isinstance(route, NotServed) and route.status == 400:
            return not_served(route)
        operation = None if isinstance(route, NotServed) else route.operation
        is_owner = self._rules.is_owner(sent) or self._rules.is_local_owner(scope)
        found = self._sessions.resolve(scope, operation, sent, is_owner)
        if not isinstance(found, bool):
            return found
        if found:
            return None
        match None if operation is None else operation.access:
            case "open":
                return None
            case "owner":
                return self._rules.owner_refusal(scope) or self._sessions.starting()
            case "local_owner":
                return self._rules.local_owner_refusal(scope) or self._sessions.starting()
            case "control":
                return self._rules.control_refusal(scope)
            case _:  # "key", and what nobody serves
                return self._rules.refusal(scope)
