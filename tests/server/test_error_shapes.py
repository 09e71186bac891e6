"""Every error of every route has the shape of the route's dialect, whoever finds the fault."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.errors import ControlTimeoutError, ServerUnavailableError
from verl_server.server import app as app_module
from verl_server.server.auth import AccessRules
from verl_server.server.http.operation import Operation
from verl_server.server.sessions.service import SessionService

API, ADMIN = "the-api-key", "the-admin-key"
OWNER = {"Authorization": f"Bearer {ADMIN}"}
INNER = {"message", "type", "param", "code"}


def mounted(stack: Stack) -> list[Operation]:
    sessions = SessionService(stack.manager, stack.args)
    return app_module.operations(stack.manager, stack.args, AccessRules(stack.args), sessions)


def places(stack: Stack) -> list[tuple[Operation, str]]:
    """Return every operation under each of its paths, with a value for each parameter of the path."""
    return [(operation, re.sub(r"{\w+(:path)?}", "x", p)) for operation in mounted(stack) for p in operation.paths]


def check_shape(dialect: str, response: httpx.Response, case: Any) -> str:
    """Compare an answer with the shape of a dialect, and return its message. The shapes are written a second time."""
    assert response.headers["content-type"] == "application/json", case
    body = response.json()
    error = body["error"]
    match dialect:
        case "anthropic":
            assert body.keys() == {"type", "error"} and body["type"] == "error", case
            assert error.keys() - {"code"} == {"type", "message"}, case
        case "vllm":
            assert body.keys() == {"error"} and error.keys() == INNER, case
        case _:
            extra = {"success"} if "success" in body else set()
            assert body.keys() == {"object", "error"} | INNER | extra and error.keys() == INNER, case
            assert (body["object"], body["code"]) == ("error", response.status_code), case
            assert body["message"] == error["message"] and not body.get("success", False), case
            if dialect == "openai":
                assert error["type"] in ("BadRequestError", "InternalServerError"), case
    assert isinstance(error["message"], str) and error["message"], case
    return str(error["message"])


@pytest.fixture
def guarded(make_stack: MakeStack) -> Stack:
    return make_stack(
        api_key=API, admin_api_key=ADMIN, unknown_fields="refuse", max_request_bytes=4096, enable_metrics=False
    )


FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "key": (401, {}),
    "wrong key": (401, {"headers": {"x-api-key": "wrong"}}),
    "instance": (412, {"headers": OWNER | {"X-Verl-Expected-Instance": "another"}}),
    "rank": (400, {"headers": OWNER | {"X-data-parallel-rank": "3"}}),
    "query": (400, {"headers": OWNER, "params": {"zzz": "1"}}),
    "too large": (413, {"headers": OWNER, "content": b"[" * 5000}),
    "no JSON": (400, {"headers": OWNER, "content": b"{"}),
    "web page": (403, {"headers": OWNER | {"Sec-Fetch-Site": "cross-site"}}),
    "web form": (415, {"headers": OWNER | {"Content-Type": "text/plain"}, "content": b"{}"}),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_request_that_is_refused(guarded: Stack, fault: str) -> None:
    status, request = FAULTS[fault]
    tried = 0
    for operation, path in places(guarded):
        is_guarded = operation.access in ("control", "owner")
        applies = {
            "key": operation.access != "open",
            "wrong key": operation.access != "open",
            "too large": operation.body is not None and "{" not in operation.path,
            "no JSON": operation.body is not None and "{" not in operation.path,
            "web page": is_guarded,
            "web form": is_guarded,
        }
        if not applies.get(fault, True):
            continue
        for method in operation.methods:
            response = guarded.request(method, path, **request)
            case = (fault, method, path, response.status_code, response.text)
            assert response.status_code == status, case
            message = check_shape(operation.dialect, response, case)
            tried += 1
            if status == 401:
                assert "`Authorization: Bearer KEY` or `x-api-key: KEY`" in message, case
                assert ("admin_api_key" in message) and ("(api_key)" in message) == (operation.access != "control"), (
                    case
                )
                assert response.headers["WWW-Authenticate"] == "Bearer", case
                assert response.headers["X-Verl-Error"] == "UnauthorizedError", case
    assert tried > 20


def test_another_method_of_a_path(guarded: Stack) -> None:
    for operation, path in places(guarded):
        response = guarded.request("PATCH", path, headers=OWNER)
        case = (path, response.text)
        assert response.status_code == 405 and set(operation.methods) <= set(response.headers["Allow"].split(", ")), (
            case
        )
        check_shape(operation.dialect, response, case)


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages/batches", "anthropic"),
        ("/v1/messages/", "anthropic"),
        ("/v1/embeddings", "openai"),
        ("/v1/chat/completions/x", "openai"),
        ("/v1", "openai"),
        ("/inference/v1/generate/x", "vllm"),
        ("/sessions/x/turns", "sessions"),
        ("/generate/x", "sglang"),
        ("/", "sglang"),
        ("/nothing", "sglang"),
        ("//", "sglang"),
        ("/v1/mess%0Aages", "openai"),
    ],
)
def test_a_path_that_is_not_served_has_the_shape_of_its_neighbours(guarded: Stack, path: str, dialect: str) -> None:
    response = guarded.request("DELETE", path, headers=OWNER)
    assert response.status_code in (400, 404, 405), response.text
    check_shape(dialect, response, (path, response.text))


def test_a_header_names_the_dialect_of_a_shared_path_and_of_one_that_nobody_serves(guarded: Stack) -> None:
    own = OWNER | {"anthropic-version": "2023-06-01"}
    sent: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/files", {"headers": own}),
        ("GET", "/nothing", {"headers": own}),
        ("GET", "/", {"headers": {"anthropic-version": "x"}, "params": {"zzz": "1"}}),
    ]
    for path in ("/v1/models", "/v1/models/x"):
        sent += [
            ("POST", path, {"headers": own}),
            ("GET", path, {"headers": {"anthropic-version": "x"}}),
            ("GET", path, {"headers": own | {"X-Verl-Expected-Instance": "another"}}),
            ("GET", path, {"headers": own, "params": {"zzz": "1"}}),
            ("GET", f"/s/vs-{'x' * 43}{path}", {"headers": {"anthropic-version": "x"}}),
        ]
    for method, path, request in sent:
        response = guarded.request(method, path, **request)
        assert response.status_code >= 400
        dialect = "sglang" if path == "/" else "anthropic"  # the root is served, and SGLang's alone
        check_shape(dialect, response, (method, path, response.text))


def test_a_handler_that_fails(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {RuntimeError: 500, ServerUnavailableError: 503, ControlTimeoutError: 504}
    real = app_module.operations
    raised: list[type[Exception]] = []

    def failing(*arguments: Any) -> list[Operation]:
        async def fail(request: Any) -> Any:
            raise raised[0]("the reason")

        def broken(operation: Operation) -> Operation:
            async def handler(request: Any) -> Any:
                return await fail(request)

            handler.__module__ = operation.handler.__module__
            return dataclasses.replace(operation, handler=handler)

        return [broken(operation) for operation in real(*arguments)]

    monkeypatch.setattr(app_module, "operations", failing)
    stack = make_stack()
    for kind, status in kinds.items():
        raised[:] = [kind]
        for operation, path in places(stack):
            if operation.access == "owner":  # refused: the server has no key
                continue
            response = stack.request(operation.methods[0], path)
            case = (path, response.text)
            assert response.status_code == status, case
            assert "the reason" in check_shape(operation.dialect, response, case), case


def test_the_keys_of_sessions(guarded: Stack) -> None:
    made = guarded.post("/sessions", {}, headers=OWNER).json()
    own = {"Authorization": f"Bearer {made['key']}"}
    for operation, path in places(guarded):
        if operation.in_session or operation.access == "open":
            continue
        response = guarded.request(operation.methods[0], path, headers=own)
        assert response.status_code == 403, path
        assert "own session only" in check_shape(operation.dialect, response, path)
    assert guarded.request("DELETE", f"/sessions/{made['id']}", headers=OWNER).status_code == 200
    for path, dialect in (("/v1/messages", "anthropic"), ("/v1/responses", "openai"), ("/generate", "sglang")):
        gone = guarded.post(path, {}, headers=own)
        assert gone.status_code == 401
        assert "session key" in check_shape(dialect, gone, path)


def test_a_server_without_keys_has_no_sessions(module_stack: Stack) -> None:
    for operation, path in places(module_stack):
        if operation.access == "owner":
            response = module_stack.request(operation.methods[0], path)
            assert response.status_code == 403 and "--api-key-file" in check_shape(operation.dialect, response, path)
    response = module_stack.post(f"/s/ses_{'x' * 43}/v1/messages", {})
    assert response.status_code == 401
    assert "--api-key-file" in check_shape("anthropic", response, "a session key in the path")


def test_an_answer_that_comes_again_is_refused_in_its_dialect(module_stack: Stack) -> None:
    for operation, path in places(module_stack):
        if operation.replayed:
            response = module_stack.post(path, {}, headers={"Idempotency-Key": "k" * 300})
            assert response.status_code == 400
            assert "Idempotency-Key" in check_shape(operation.dialect, response, path)
