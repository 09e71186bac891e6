"""Every operation, for every key, in twenty spellings of its path: nothing is reached that the key may not call."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.server.app import operations
from verl_server.server.auth import AccessRules
from verl_server.server.http.operation import Operation
from verl_server.server.http.routing import Dispatch, route_of
from verl_server.server.sessions.service import SessionService
from verl_server.web.resolver import Found

SPELLINGS = [
    "{p}", "{p}%0A", "{p}%0D%0A", "%0A{p}", "{p}%00", "{p}%09", "{p}%7F", "{p}%C2%85", "{p}%20", "{p}/", "{p}//",
    "/{p}", "/.{p}", "{p}/.", "{p}/../x", "{p};a=b", "{p}%3Fx", "{p}%23", "/x/..{p}", "{p}%2F", "{p}%E2%80%A8", "{p}\\",
    "{P}", "/s/EMPTY{p}", "//s/x{p}", "http://localhost{p}",
]  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "get", "POST\n")
API, ADMIN = "api", "admin"


def may_call(operation: Operation, caller: str | None, settings: dict[str, str]) -> bool:
    """The rules, written a second time."""
    is_owner = caller is not None and caller in settings.values()
    if caller == "session":
        return operation.in_session or operation.access == "open"
    match operation.access:
        case "open":
            return True
        case "owner":
            return is_owner
        case "local_owner":
            return is_owner or not settings
        case "control":
            needed = settings.get("admin_api_key", settings.get("api_key"))
            return needed is None or caller == needed
        case "key":
            return "api_key" not in settings or is_owner


@pytest.mark.parametrize(
    "settings", [{}, {"api_key": API}, {"admin_api_key": ADMIN}, {"api_key": API, "admin_api_key": ADMIN}], ids=str
)
def test_every_operation_for_every_key_in_every_spelling(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    stack = make_stack(**settings)
    mounted = operations(stack.manager, stack.args, AccessRules(stack.args), SessionService(stack.manager, stack.args))
    keys: dict[str | None, str | None] = {None: None, "wrong": "wrong", API: API, ADMIN: ADMIN}
    if settings:
        owner = next(iter(settings.values()))
        made = stack.post("/sessions", {}, headers={"Authorization": f"Bearer {owner}"})
        keys["session"] = made.json()["key"]
    reached: list[Operation] = []

    async def record(self: Any, scope: Any, receive: Any, send: Any) -> None:
        route = route_of(scope)
        if isinstance(route, Found):
            reached.append(route.operation)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(Dispatch, "__call__", record)
    assert len(mounted) > 80
    stack.manager.run_sync(_try_all(stack, mounted, keys, settings, reached), 120)


async def _try_all(
    stack: Stack,
    mounted: list[Operation],
    keys: dict[str | None, str | None],
    settings: dict[str, str],
    reached: list[Operation],
) -> None:
    unread = True

    async def receive() -> Any:
        nonlocal unread
        unread, body = False, unread
        return {"type": "http.request", "body": b"{}"} if body else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    for operation in mounted:
        for path in operation.paths:
            plain = re.sub(r"{\w+(:path)?}", "x", path)
            spelled = {urllib.parse.unquote(each.format(p=plain, P=plain.upper())) for each in SPELLINGS}
            for caller, key in keys.items():
                headers = [(b"host", b"localhost")]
                headers += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
                tried = [(method, each) for method in operation.methods for each in spelled]
                tried += [(method, plain) for method in METHODS if method not in operation.methods]
                for method, each in tried:
                    reached.clear()
                    scope = {"type": "http", "method": method, "path": each, "headers": list(headers)}
                    scope |= {"raw_path": b"", "query_string": b"", "server": ("localhost", 1), "state": {}}
                    await stack.app(scope, receive, send)
                    case = (caller, method, each)
                    if each == plain and method in operation.methods:
                        assert bool(reached) == may_call(operation, caller, settings), case
                    elif "{" not in path and each != plain:
                        assert all(found is not operation for found in reached), case
                    assert all(may_call(found, caller, settings) for found in reached), case
