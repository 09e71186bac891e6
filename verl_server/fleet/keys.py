"""`RouterKeys`: who may call the router, and which key a server gets.

Without keys of its own, the router passes the keys of callers on, and the servers decide. With them, it checks the
caller's key and replaces it by the key of the servers for what the caller has proved, never for more. The key of a
session passes always, alone.
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


@dataclass(frozen=True)
class Caller:
    """What a request is permitted to do."""

    attached: bytes | None
    """Key that replaces the caller's keys. None: they are passed on. b"": they are removed."""


class RouterKeys:
    def __init__(self, args: RouterArgs) -> None:
        """Read the keys. Raise BadRequestError, which names the option, for a file that cannot be read."""
        self._host = args.host
        self.api = _read(args.api_key_file, "--api-key-file")
        self.admin = _read(args.admin_api_key_file, "--admin-api-key-file")
        self.servers_api = _read(args.server_api_key_file, "--server-api-key-file")
        self.servers_admin = _read(args.server_admin_api_key_file, "--server-admin-api-key-file")
        self._are_open_locally = is_loopback(args.host) or self.api is not None

    @property
    def of_router(self) -> str | None:
        """The key with which the router itself reads the servers' information."""
        return self.servers_api or self.servers_admin

    def caller(self, scope: Scope, operation: RoutedOperation | None, *, has_path_key: bool) -> Caller:
        """Check a request. Raise ForbiddenError or UnauthorizedError. `operation` is None for a path of the router."""
        access = "control" if operation is None else operation.access
        if access in ("control", "owner", "local_owner"):
            self._check_page(scope)
        sent = sent_keys(scope)
        in_session = has_path_key or any(key.startswith(KEY_PREFIX.encode()) for key in sent)
        if in_session or (self.api is None and self.admin is None):
            if access == "local_owner" and not self._are_open_locally and not sent:
                raise ForbiddenError("Sessions without a key exist on a router that listens on loopback only.")
            return Caller(None)
        if self.admin is not None and is_one_of(sent, [self.admin]):
            return Caller(_bytes(self.servers_admin or self.servers_api))
        if self.api is not None and is_one_of(sent, [self.api]):
            if access == "control" and self.admin is not None:
                raise self._needs(scope, ["admin key (--admin-api-key-file)"], sent)
            return Caller(_bytes(self.servers_api))
        if access == "open" or (self.api is None and access == "key"):
            return Caller(b"")
        names = ["router's API key (--api-key-file)"] if self.api is not None and access != "control" else []
        raise self._needs(scope, [*names, "router's admin key (--admin-api-key-file)"], sent)

    def check_own_control(self, scope: Scope) -> None:
        """Check a request to a control route of the router itself. Raise ForbiddenError or UnauthorizedError.

        A router without an admin key takes its api key, or the servers' keys that it was started with.
        """
        self._check_page(scope)
        key = self.admin or self.api or self.servers_admin or self.servers_api
        if key is not None and not is_one_of(sent := sent_keys(scope), [key]):
            raise self._needs(scope, ["router's admin key (--admin-api-key-file)"], sent)

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
