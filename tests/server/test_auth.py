"""Each key may call the routes that SGLang's key levels permit, and web pages may not control a server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.messages import io_struct as io

NORMAL, ADMIN, OPEN = "/model_info", "/flush_cache", "/health"


@pytest.mark.parametrize(
    ("settings", "key", "allowed"),
    [
        ({}, None, {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k"}, None, {OPEN}),
        ({"api_key": "k"}, "k", {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k"}, "wrong", {OPEN}),
        ({"admin_api_key": "a"}, None, {NORMAL, OPEN}),
        ({"admin_api_key": "a"}, "a", {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k", "admin_api_key": "a"}, "k", {NORMAL, OPEN}),
        ({"api_key": "k", "admin_api_key": "a"}, "a", {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k", "admin_api_key": "a"}, "ké", {OPEN}),
    ],
)
def test_levels(make_stack: MakeStack, settings: dict[str, str], key: str | None, allowed: set[str]) -> None:
    stack = make_stack(**settings)
    headers = {} if key is None else {"Authorization": f"bearer {key}".encode()}
    for path in (NORMAL, ADMIN, OPEN):
        response = stack.get(path, headers=headers)
        assert response.status_code == (200 if path in allowed else 401), path
        if path not in allowed:
            needed = "admin key" if path == ADMIN and "admin_api_key" in settings else "API key"
            said = response.json()["error"]["message"]
            assert needed in said and "`Authorization: Bearer KEY` or `x-api-key: KEY`" in said
            assert ("has no key" in said) == (key is None)
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert response.headers["X-Verl-Error"] == "UnauthorizedError", "a proxy's 401 has no such header"


@pytest.mark.parametrize("header", ["k", "Basic k", "Bearer", "Bearer  k x", ""])
def test_malformed_headers_are_refused(make_stack: MakeStack, header: str) -> None:
    stack = make_stack(api_key="k")
    assert stack.get(NORMAL, headers={"Authorization": header}).status_code == 401


def test_a_request_is_aborted_with_the_ordinary_key_and_all_with_the_admin_key(make_stack: MakeStack) -> None:
    stack = make_stack(api_key="k", admin_api_key="a")
    plain, admin = ({"Authorization": f"Bearer {key}"} for key in "ka")
    assert stack.post("/abort_request", {"rid": "r"}).status_code == 401
    assert stack.post("/abort_request", {"rid": "r"}, headers=plain).status_code == 200
    assert stack.post("/abort_request", {"abort_all": True}, headers=plain).status_code == 401
    assert not [m for m in stack.scheduler.received if isinstance(m, io.AbortReq)]
    assert stack.post("/abort_request", {"abort_all": True}, headers=admin).status_code == 200
    assert stack.scheduler.wait_for(io.AbortReq)[0].abort_all


# -- web pages ----------------------------------------------------------------------------------------------

OWN = [
    {},
    {"Host": "localhost:30000"},
    {"Host": "127.0.0.1"},
    {"Host": "[::1]:30000"},
    {"Host": "LOCALHOST."},
    {"Host": "localhost:30000", "Origin": "http://localhost:30000", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Content-Type": "application/json; charset=utf-8"},
]
FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"Host": "rebound.example:30000"}, 403),
    ({"Host": "localhost.example"}, 403),
    ({"Host": "127.0.0.1.example"}, 403),
    ({"Host": "["}, 403),
    ({"Origin": "http://page.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Host": "localhost:30000", "Origin": "http://localhost:3000"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "Text/Plain;charset=UTF-8"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
]


def calls(stack: Stack, headers: dict[str, str]) -> dict[tuple[str, str], int]:
    """Return the status of control calls, one of each kind."""
    body: dict[str, Any] = {"content": b"{}", "headers": headers}
    routes = [
        ("GET", "/flush_cache"),
        ("POST", "/flush_cache"),
        ("POST", "/end_weight_update"),
    ]
    routes += [("GET", "/release_memory_occupation"), ("POST", "/pause_generation"), ("POST", "/continue_generation")]
    return {(method, path): stack.request(method, path, **body).status_code for method, path in routes}


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_programs_control_a_server_on_loopback(module_stack: Stack, headers: dict[str, str]) -> None:
    assert set(calls(module_stack, headers).values()) == {200}


@pytest.mark.parametrize(("headers", "status"), FOREIGN, ids=str)
def test_pages_do_not_control_a_server_on_loopback(module_stack: Stack, headers: dict[str, str], status: int) -> None:
    before = len(module_stack.scheduler.received)
    assert set(calls(module_stack, headers).values()) == {status}
    body = {"content": b'{"abort_all": true}', "headers": headers}
    assert module_stack.request("POST", "/abort_request", **body).status_code == status
    assert len(module_stack.scheduler.received) == before, "a refused call reached the scheduler"
    generate = {"content": b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}', "headers": headers}
    assert module_stack.request("POST", "/generate", **generate).status_code == 200, "generation stays open"


def test_a_key_does_not_make_a_page_welcome(make_stack: MakeStack) -> None:
    stack = make_stack(admin_api_key="a")
    headers = {"Authorization": "Bearer a"}
    assert stack.get("/flush_cache", headers=headers | {"Host": "rebound.example"}).status_code == 403
    assert stack.get("/flush_cache", headers={"Host": "rebound.example"}).status_code == 401


def test_other_addresses_have_other_names(make_stack: MakeStack) -> None:
    stack = make_stack(host="0.0.0.0", allow_unauthenticated=True)
    assert stack.get("/flush_cache", headers={"Host": "rollout-7.cluster:30000"}).status_code == 200
    refused = stack.get("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"})
    assert (refused.status_code, refused.headers["X-Verl-Error"]) == (403, "ForbiddenError")
