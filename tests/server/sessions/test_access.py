"""Who may call what: every operation of the server, for every kind of caller, against one closed table."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.server.app import create_app, operations
from verl_server.server.auth import AccessRules
from verl_server.server.sessions.service import SessionService
from verl_server.web.resolver import Found, NotServed, Resolver

OWNER = {"Authorization": "Bearer owner"}
PERMITTED = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/generate"),
    ("PUT", "/generate"),
    ("POST", "/inference/v1/generate"),
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
}
"""What a session key permits, beside the open routes. The test has its own copy, so that a change is noticed."""
OPEN = re.compile(r"/(health|ready|metrics|ping|liveness)")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def create(stack: Stack, **body: Any) -> dict[str, Any]:
    response = stack.post("/sessions", body, headers=OWNER)
    assert response.status_code == 201, response.text
    created: dict[str, Any] = response.json()
    return created


def calls(stack: Stack) -> list[tuple[str, str, bool]]:
    """Return (method, path, True if an operation serves it) for all operations, and for paths that nobody serves."""
    mounted = operations(stack.manager, stack.args, AccessRules(stack.args), SessionService(stack.manager, stack.args))
    resolver = Resolver(mounted)
    paths = {re.sub(r"{\w+(:\w+)?}", "x", path) for operation in mounted for path in operation.paths}
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
    every = [(method, path) for path in sorted(paths | {"/nothing", "/v1", "/"}) for method in methods]
    return [(*each, isinstance(resolver.find(*each), Found)) for each in every]


def reaches(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace all routes by one that records the calls that come through."""
    reached: list[tuple[str, str]] = []

    async def record(self: Any, scope: Any, receive: Any, send: Any) -> None:
        reached.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr("verl_server.server.http.routing_headers.RoutingHeadersMiddleware.__call__", record)
    return reached


def test_a_session_key_reaches_the_routes_of_the_table_only(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(api_key="owner", admin_api_key="admin")
    key = create(stack)["key"]
    every = calls(stack)
    reached = reaches(stack, monkeypatch)
    for headers, prefix in ((bearer(key), ""), ({"x-api-key": key}, ""), ({}, f"/s/{key}"), (OWNER, f"/s/{key}")):
        for method, path, is_served in every:
            reached.clear()
            response = stack.request(method, prefix + path, headers=headers)
            opened = bool(OPEN.match(path)) and method in ("GET", "HEAD")
            head = method == "HEAD" and ("GET", path) in PERMITTED
            expected = opened or head or (method, path) in PERMITTED or not is_served
            assert reached == ([(method, path)] if expected else []), (method, path, prefix)
            if not expected:
                assert response.status_code == 403, (method, path)
                assert method == "HEAD" or "in its own session only" in response.text
                assert response.headers["x-should-retry"] == "false"


def test_a_path_without_a_route_is_no_matter_of_the_key(make_stack: MakeStack) -> None:
    """Programs look at their base URL, or try paths of their vendor's service, before they generate."""
    stack = make_stack(api_key="owner")
    key = create(stack)["key"]
    unknown = key[:-8] + "x" * 8
    for path, status in (("", 200), ("/", 200), ("/v1", 404), ("/v1/files", 404), ("/v1/messages", 405)):
        for method in ("GET", "HEAD"):
            assert stack.request(method, f"/s/{key}{path}").status_code == status, (method, path)
            assert stack.request(method, path or "/", headers=bearer(key)).status_code == status
            assert stack.request(method, f"/s/{unknown}{path}").status_code == 401
            assert stack.request(method, path or "/").status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "//generate",
        "/generate/",
        "/./generate",
        "/v1/../generate",
        "/generate;x",
        "/Generate",
        "/sessions",
        "//sessions",
        "/%73essions",
        "/v1/models/../../sessions/x/reward",
        "/%2Fsessions",
    ],
)
def test_other_spellings_are_closed_to_a_session_key(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    stack = make_stack(api_key="owner")
    key = create(stack)["key"]
    mounted = operations(stack.manager, stack.args, AccessRules(stack.args), SessionService(stack.manager, stack.args))
    resolver, reached = Resolver(mounted), reaches(stack, monkeypatch)
    for prefix, headers in (("", bearer(key)), (f"/s/{key}", {})):
        for method in ("POST", "GET"):
            response = stack.request(method, f"http://localhost{prefix}{path}", headers=headers)
            if reached:
                call = (method, reached.pop()[1])
                assert call in PERMITTED or isinstance(resolver.find(*call), NotServed), (
                    "httpx makes another path of it"
                )
            else:
                assert response.status_code in (401, 403), response.text


@pytest.mark.parametrize("settings", [{"api_key": "owner"}, {"admin_api_key": "owner"}])
def test_session_routes_need_an_owners_key(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    stack = make_stack(**settings)
    mounted = operations(stack.manager, stack.args, AccessRules(stack.args), SessionService(stack.manager, stack.args))
    owned = [operation for operation in mounted if operation.access in ("owner", "local_owner")]
    assert len(owned) >= 8
    for operation in mounted:
        for path in operation.paths:
            is_session_path = re.match(r"/(sessions|open_session)\b", path) is not None
            assert is_session_path == (operation in owned), path
    reached = reaches(stack, monkeypatch)
    for operation in owned:
        for method in operation.methods:
            path = re.sub(r"{\w+}", "x", operation.path)
            assert stack.request(method, path).status_code == 401
            assert stack.request(method, path, headers=bearer("wrong")).status_code == 401
            page = {**OWNER, "Sec-Fetch-Site": "cross-site"}
            assert stack.request(method, path, headers=page).status_code == 403
            assert not reached
            assert stack.request(method, path, headers=OWNER).status_code == 204
            assert reached.pop() == (method, path)


def test_without_a_key_there_are_no_sessions(make_stack: MakeStack) -> None:
    stack = make_stack()
    for method, path in (
        ("POST", "/sessions"),
        ("GET", "/sessions"),
        ("GET", "/sessions/x"),
    ):
        response = stack.request(method, path, json={} if method == "POST" else None)
        assert (response.status_code, response.headers["X-Verl-Error"]) == (403, "ForbiddenError")
        assert "--api-key-file or --admin-api-key-file" in response.text
    assert stack.request("GET", "/s/vs-x/v1/models").status_code == 401
    assert stack.get("/v1/models", headers=bearer("vs-" + "x" * 43)).status_code == 200, "as before"


def test_sglangs_sessions_need_no_key_on_loopback(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.app = create_app(stack.manager, stack.args, SessionService(stack.manager, stack.args))

    def ask(ids: list[int], **params: Any) -> Any:
        return stack.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 2}, session_params={"id": "s", **params}
        )

    page = {"Sec-Fetch-Site": "cross-site"}
    body = {"capacity_of_str_len": 1, "session_id": "s"}
    assert stack.post("/open_session", body, headers=page).status_code == 403
    assert stack.post("/open_session", body).json() == "s" and stack.post("/open_session", body).status_code == 400
    first = ask([5])
    second = ask([9], rid=first["meta_info"]["id"])
    assert stack.scheduler.received[-1].input_ids == [5, *first["output_ids"], 9]
    assert second["meta_info"]["session"]["parent"] == 0
    assert stack.post("/generate", {"input_ids": [5]}, headers={"X-Session-ID": "s"}).status_code == 200
    assert stack.get("/sessions/s").status_code == 403, "the record is an owner's"
    from_page = stack.post("/generate", {"input_ids": [5], "session_params": {"id": "s"}}, headers=page)
    assert from_page.status_code == 400 and "session_params.id" in from_page.text
    assert stack.post("/close_session", {"session_id": "s"}, headers=page).status_code == 200
    ask([5])
    assert stack.post("/close_session", {"session_id": "s"}).status_code == 200
    assert stack.post("/generate", {"input_ids": [5], "session_params": {"id": "s"}}).status_code == 404


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0", "allow_unauthenticated": True}, {"admin_api_key": "a"}])
def test_sglangs_sessions_need_a_key_elsewhere(make_stack: MakeStack, settings: dict[str, Any]) -> None:
    stack = make_stack(**settings)
    assert stack.post("/open_session", {"session_id": "s"}).status_code in (401, 403)
    body = {"input_ids": [5], "session_params": {"id": "s"}}
    assert "needs the owner's key" in stack.post("/generate", body).json()["error"]["message"]


def test_ended_unknown_and_contradicting_keys(make_stack: MakeStack) -> None:
    stack = make_stack(admin_api_key="owner")
    one, two = create(stack), create(stack)
    models = "/v1/models"
    assert stack.get(models).status_code == 200, "ordinary routes are open"
    assert stack.get(models, headers=bearer(one["key"])).status_code == 200
    assert stack.get(one["base_url"] + "/models").status_code == 200
    assert stack.get(one["base_url"] + "/models", headers=bearer(one["key"])).status_code == 200
    assert stack.get(one["base_url"] + "/models", headers=bearer("EMPTY")).status_code == 200
    for headers, prefix in (
        (bearer(one["key"]) | {"x-api-key": two["key"]}, ""),
        (bearer(two["key"]), "/s/" + one["key"]),
        (bearer("vs-" + "x" * 43), ""),
        (bearer("vs-"), ""),
        ({}, "/s/" + "vs-" + "x" * 43),
        ({}, "/s/EMPTY"),
        ({}, "/s/"),
        ({}, "//s/" + one["key"]),
        ({}, "/s//" + one["key"]),
        ({}, "/s/" + one["key"] + "x"),
        (OWNER, "/s/EMPTY"),
    ):
        url = f"http://localhost{prefix}{models}"
        assert stack.get(url, headers=headers).status_code == 401, (headers, prefix)
    assert stack.post(f"/sessions/{one['id']}/finish", {}, headers=OWNER).status_code == 200
    assert stack.get(models, headers=bearer(one["key"])).status_code == 401
    assert stack.get(models, headers=bearer(two["key"])).status_code == 200
    assert stack.request("DELETE", f"/sessions/{two['id']}", headers=OWNER).status_code == 200
    assert stack.get(models, headers=bearer(two["key"])).status_code == 401


def test_who_a_request_belongs_to(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack(api_key="owner")
    one, two = create(stack), create(stack)
    callers: list[Any] = []

    async def record(self: Any, scope: Any, receive: Any, send: Any) -> None:
        callers.append(scope.get("state", {}).get("session"))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr("verl_server.server.http.routing_headers.RoutingHeadersMiddleware.__call__", record)

    def caller(headers: dict[str, str], prefix: str = "") -> Any:
        assert stack.post(f"{prefix}/generate", {}, headers=headers).status_code == 204
        return callers.pop()

    named = {"X-Session-ID": one["id"]}
    by_key, by_path = caller(bearer(one["key"])), caller({}, f"/s/{one['key']}")
    assert by_key == by_path
    assert (by_key.session_id, by_key.child, by_key.is_owner) == (one["id"], None, False)
    by_header = caller(OWNER | named)
    assert (by_header.session_id, by_header.is_owner) == (one["id"], True)
    assert by_header.scope_key != by_key.scope_key
    assert caller(OWNER) is None
    assert caller(OWNER | {"X-Session-ID": "nobody"}) is None, "a hint for routers"
    assert caller(bearer(one["key"]) | {"X-Session-Child": "helper"}).child == "helper"
    assert caller(bearer(one["key"]) | {"X-Session-ID": two["id"]}).session_id == one["id"], "the key decides"


def test_a_header_names_no_session_without_an_owners_key(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(admin_api_key="owner")
    session_id = create(stack)["id"]
    seen: list[Any] = []
    monkeypatch.setattr("verl_server.server.sessions.access.SessionCaller", lambda *args: seen.append(args))
    assert stack.get("/v1/models", headers={"X-Session-ID": session_id}).status_code == 200
    assert not seen


def test_no_key_is_in_a_path_a_log_or_an_error(make_stack: MakeStack, caplog: pytest.LogCaptureFixture) -> None:
    stack = make_stack(api_key="owner")
    key = create(stack)["key"]
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, logger="httpx")  # the client's own log
    for path in (
        f"/s/{key}/v1/models",
        f"/s/{key}/sessions",
        f"//s/{key}/v1",
        f"/s/{key}",
        f"/x/{key}/y",
        f"/s/{key}x/",
    ):
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": [], "state": {}}
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        stack.manager.run_sync(stack.app(scope | {"query_string": b"", "server": ("localhost", 1)}, receive, send), 10)
        assert key not in repr(sent)
    # The scope that the server hands in is changed in place, because its access log reads the path afterwards.
    scope = {"type": "http", "method": "GET", "path": f"/s/{key}/nothing", "headers": [], "query_string": b""}
    scope["raw_path"] = scope["path"].encode()  # type: ignore[attr-defined]
    stack.manager.run_sync(stack.app(scope, receive, send), 10)
    assert (scope["path"], scope["raw_path"]) == ("/nothing", b"/nothing")
    for path in (f"/S/{key}/v1", f"/v1/s/{key}", f"/s//{key}", f"//s/{key}/generate"):
        scope |= {"path": path, "raw_path": path.encode(), "query_string": f"key={key}".encode(), "headers": []}
        scope["headers"] = [(b"x-verl-expected-instance", b"another")]
        stack.manager.run_sync(stack.app(scope, receive, send), 10)
        assert key not in repr(scope | {"state": None}), path
    for url in (f"/sessions/{key}", f"/x/{key}"):
        assert key not in stack.get(url, headers=OWNER).text
    assert key not in caplog.text
    assert key not in stack.get("/sessions", headers=OWNER).text
