"""`SessionAccess` finds the session that a request belongs to, and decides what a session key permits.

A request names its session by the session key (as API key, or in the path `/s/KEY/v1/...`), or by the header
X-Session-ID together with an owner's key. `SessionPathMiddleware` is the outermost middleware: it removes a key from
the path in place, so that no log and no error contains the key. `AuthMiddleware` calls `SessionAccess.resolve` before
any route. A session key permits open operations, and in its own session also operations with `in_session`. Every other
operation is refused. A path that no operation serves is answered as without a session: some programs try paths of their
vendor's service first, and a refusal of the key would end them.
"""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.errors import (
    BadRequestError,
    ForbiddenError,
    SessionUnavailableError,
    UnauthorizedError,
    VerlServerError,
)
from verl_server.server.http.operation import Operation
from verl_server.server.sessions.session import CHILD_NAME, SessionCaller
from verl_server.server.sessions.table import SessionTable
from verl_server.web.session_keys import CHILD_HEADER, KEY_PREFIX, SESSION_HEADER, take_session_key

_STATE = "session_key"
"""Name in `scope["state"]` of the key that was in the path, until `SessionAccess` reads it."""
_OWNER_STATE = "owner"
"""Name in `scope["state"]` of the hash of an owner's key."""
_NO_KEY = "sessions need a key: start the server with --api-key-file or --admin-api-key-file"


def owner_of(scope: Scope) -> bytes | None:
    """Return a hash of the owner's key that a request without a session key was sent with, or None.

    On a loopback server without keys, every request that no web page sent has the rights of an owner.
    """
    key: bytes | None = scope.get("state", {}).get(_OWNER_STATE)
    return key


def without_owner_key() -> VerlServerError:
    """Return the error of a session route on a server without keys."""
    return ForbiddenError(_NO_KEY)


def _unknown_session_key() -> VerlServerError:
    return UnauthorizedError(
        "Unauthorized: the session key of this request is of no session that this server has. Send the `key` of "
        "POST /sessions as `Authorization: Bearer KEY`, as `x-api-key: KEY` or in the path, /s/KEY/v1/..., and one "
        "session key only. A session that was deleted or has expired has no key."
    )


class SessionPathMiddleware:
    """Removes a session key from the path of each request, and hides other session keys in path and query."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = take_session_key(scope)
            if key is not None:
                scope.setdefault("state", {})[_STATE] = key
        await self._app(scope, receive, send)


class SessionAccess:
    """Reads the session of each request. `owner_keys` are the server's keys; without one, there are only the sessions
    of SGLang's wire, which `session_params` names."""

    def __init__(self, table: SessionTable, owner_keys: list[str]) -> None:
        self._table = table
        self._owner_keys = [key.encode() for key in owner_keys]

    def resolve(
        self, scope: Scope, operation: Operation | None, sent_keys: list[bytes], is_owner: bool
    ) -> VerlServerError | bool:
        """Find the session of a request, and set `scope["state"]["session"]`. Remove a key from the path.

        Return an error that refuses the request, True if a session key permits the request, or False if the ordinary
        rules decide. `operation` is None if no route serves the request. `sent_keys` are the keys in the headers.
        `is_owner`: an owner's key is among `sent_keys`, or the request owns SGLang's sessions without one.
        """
        in_path: bytes | None = scope.get("state", {}).pop(_STATE, None)
        if not self._owner_keys:
            if in_path is not None:
                return UnauthorizedError(f"Unauthorized: the path has a session key, and {_NO_KEY}.")
            if is_owner:
                scope.setdefault("state", {})[_OWNER_STATE] = _scope_key(sent_keys)
            return False
        keys = {key for key in sent_keys if key.startswith(KEY_PREFIX.encode()) and key not in self._owner_keys}
        if in_path is not None:
            keys.add(in_path)
        headers = Headers(scope=scope)
        if not keys:
            if not is_owner:
                return False
            scope_key = _scope_key(sent_keys)
            scope.setdefault("state", {})[_OWNER_STATE] = scope_key
            return self._resolve_header(scope, operation, headers, scope_key) or False
        if (refusal := self.starting()) is not None:
            return refusal
        session_id = self._table.of_key(keys.pop().decode("latin-1")) if len(keys) == 1 else None
        if session_id is None:
            return _unknown_session_key()
        if operation is None:
            return True
        if not (operation.in_session or operation.access == "open"):
            return ForbiddenError(
                f"A session key permits generation in its own session only: {scope['method']} {scope['path']} needs "
                "the owner's key."
            )
        key_hash = self._table.find(session_id).record.key_hash
        return self._enter(scope, session_id, headers.get(CHILD_HEADER), False, key_hash[:16]) or True

    def starting(self) -> VerlServerError | None:
        """Return the refusal of a request that needs a session while sessions are still read from the store."""
        if self._table.is_complete:
            return None
        return SessionUnavailableError("The server is starting and reads its session store. Retry later.")

    def _resolve_header(
        self, scope: Scope, operation: Operation | None, headers: Headers, scope_key: bytes
    ) -> VerlServerError | None:
        """Set the session that X-Session-ID names. Return a refusal or None. An unknown id is a hint for routers."""
        named = headers.get(SESSION_HEADER)
        if named is None or operation is None or not operation.in_session:
            return None
        if (refusal := self.starting()) is not None:
            return refusal
        if named not in self._table:
            return None
        return self._enter(scope, named, headers.get(CHILD_HEADER), True, scope_key)

    def _enter(
        self, scope: Scope, session_id: str, child: str | None, is_owner: bool, scope_key: bytes
    ) -> VerlServerError | None:
        if child is not None and CHILD_NAME.fullmatch(child) is None:
            return BadRequestError(f"{CHILD_HEADER} must be 1 to 64 letters, digits, '_' or '-'.")
        state: dict[str, Any] = scope.setdefault("state", {})
        state["session"] = SessionCaller(session_id, child, is_owner, scope_key)
        return None


def _scope_key(sent_keys: list[bytes]) -> bytes:
    return hashlib.blake2b(b"\0".join(sorted(sent_keys)), digest_size=16).digest()
