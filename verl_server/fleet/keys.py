"""`RouterKeys`: who may call the router, and which key a server gets.

Without keys of its own, the router passes the keys of callers on, and the servers decide. With them, it checks the
caller's key and replaces it by the key of the servers for what the caller has proved, never for more. Then a server
sees none of the caller's keys, except for the key of a session, which passes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from verl_server.errors import ForbiddenError, UnauthorizedError, VerlServerError
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.options import RouterArgs
from verl_server.web.addresses import is_loopback
from verl_server.web.key_files import read_key_file
from verl_server.web.keys import is_one_of, key_needed, sent_keys
from verl_server.web.origins import page_refusal
from verl_server.web.session_keys import KEY_PREFIX

_API, _ADMIN = "router's API key (--api-key-file)", "router's admin key (--admin-api-key-file)"


@dataclass(frozen=True)
class Caller:
    """What a request is permitted to do."""

    attached: bytes | None
    """Key that replaces the caller's keys in the headers. None: they are passed on. b"": they are removed."""
    is_foreign: bool = False
    """True if a web page of another origin may have sent the request, or if it came to an address beyond loopback
    without a key: then it owns no session on a server that lets everybody on loopback own sessions."""


class RouterKeys:
    def __init__(self, args: RouterArgs) -> None:
        """Read the keys. Raise BadRequestError, which names the option, for a file that cannot be read."""
        self._host = args.host
        self.api = _read(args.api_key_file, "--api-key-file")
        self.admin = _read(args.admin_api_key_file, "--admin-api-key-file")
        self.servers_api = _read(args.server_api_key_file, "--server-api-key-file")
        self.servers_admin = _read(args.server_admin_api_key_file, "--server-admin-api-key-file")

    @property
    def of_router(self) -> str | None:
        """The key with which the router itself reads the servers' information."""
        return self.servers_api or self.servers_admin

    def caller(
        self, scope: Scope, operation: RoutedOperation, path_key: bytes | None, *, is_control: bool = False
    ) -> Caller:
        """Check a request. Raise ForbiddenError or UnauthorizedError.

        `path_key` is the session key of the path. `is_control` is True if the body makes the request a control call.
        """
        access = "control" if is_control else operation.access
        if access in ("control", "owner", "local_owner"):
            self._check_page(scope)
        sent = sent_keys(scope)
        if self.api is None and self.admin is None:
            is_own_host = is_loopback(self._host)
            if access == "local_owner" and not is_own_host and not sent:
                raise ForbiddenError("Sessions without a key exist on a router that listens on loopback only.")
            may_be_foreign = access == "key" and (not is_own_host or page_refusal(scope, self._host) is not None)
            return Caller(None, may_be_foreign)
        of_session = {key for key in sent if key.startswith(KEY_PREFIX.encode()) and not self._is_own(key)}
        if path_key is not None or of_session:
            return self._in_session(scope, operation, access, path_key, of_session)
        if self.admin is not None and is_one_of(sent, [self.admin]):
            return Caller(_bytes(self.servers_admin or self.servers_api))
        if self.api is not None and is_one_of(sent, [self.api]):
            if access == "control" and self.admin is not None:
                raise self._needs(scope, [_ADMIN], sent)
            return Caller(_bytes(self.servers_api))
        if access == "open":
            return Caller(b"")
        if self.api is None and access == "key":
            return Caller(None, True)
        names = [_API] if self.api is not None and (access != "control" or self.admin is None) else []
        raise self._needs(scope, [*names, *([_ADMIN] if self.admin is not None else [])], sent)

    def check_own_control(self, scope: Scope) -> None:
        """Check a request to a control route of the router itself. Raise ForbiddenError or UnauthorizedError.

        A router without an admin key takes its api key, or the servers' keys that it was started with.
        """
        self._check_page(scope)
        key = self.admin or self.api or self.servers_admin or self.servers_api
        if key is not None and not is_one_of(sent := sent_keys(scope), [key]):
            raise self._needs(scope, [_ADMIN if self.admin else _API if self.api else "servers' admin key"], sent)

    def _in_session(
        self, scope: Scope, operation: RoutedOperation, access: str, path_key: bytes | None, keys: set[bytes]
    ) -> Caller:
        """Check a request with the key of a session, as a server does. The servers say whether the key is one."""
        if access != "open" and not operation.in_session:
            raise ForbiddenError(
                f"A session key permits generation in its own session only: {scope['method']} {scope['path']} needs "
                "the owner's key."
            )
        if len(keys | ({path_key} if path_key is not None else set())) > 1:
            raise UnauthorizedError("Unauthorized: the request has several session keys. Send one of them only.")
        return Caller(b"" if path_key is not None else next(iter(keys)))

    def _is_own(self, key: bytes) -> bool:
        return is_one_of([key], [each for each in (self.api, self.admin) if each is not None])

    def _check_page(self, scope: Scope) -> None:
        refusal = page_refusal(scope, self._host)
        if refusal is not None:
            error = ForbiddenError(refusal.message)
            error.status_code = refusal.status
            raise error

    @staticmethod
    def _needs(scope: Scope, names: list[str], sent: list[bytes]) -> VerlServerError:
        return UnauthorizedError(key_needed(f"{scope['method']} {scope['path']}", names, sent))


def _read(file: object, option: str) -> str | None:
    return None if file is None else read_key_file(str(file), option)


def _bytes(key: str | None) -> bytes:
    return b"" if key is None else key.encode()
