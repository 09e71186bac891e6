"""The router reads a few fields of a request, whatever the rest is, and leaves every judgement to the servers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.fleet.fakes import FakeServer, refused, run, running
from tests.fleet.simulated import GENERATE
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.requests import RoutedFields, RoutedRequest, read_fields

LARGE = "x" * (2 * 2**20 + 1)
FIELDS: dict[str, Any] = {
    "session_id": "s1",
    "conversation_id": "c1",
    "session_params": {"id": "s2", "rid": "r", "offset": -3},
    "min_weight_version": "5@0000000a",
    "exact_weight_version": "free label",
    "id": "name",
}


def asking(
    body: Any = None, packed: bytes = b"", operation: RoutedOperation = GENERATE, **headers: str
) -> RoutedRequest:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
    if packed:
        given.append((b"x-verl-prompt-bytes", str(len(packed)).encode()))
    return RoutedRequest(operation, "POST", b"/generate", given, packed + content)


@pytest.mark.parametrize("text", ["x", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_fields_of_a_body(text: str, order: str) -> None:
    body = FIELDS | {"text": text} if order == "before" else {"text": text} | FIELDS
    found = read_fields(json.dumps(body).encode())
    for name, value in FIELDS.items():
        if name != "id" or text != LARGE:
            assert getattr(found, name) == value, name
    assert read_fields(json.dumps({"text": text}).encode()) == RoutedFields()


def test_the_session_of_a_large_body_is_found_anywhere() -> None:
    body = {"text": LARGE, "session_params": {"id": "s2"}, "input_ids": [1] * 2**20}
    assert read_fields(json.dumps(body).encode()).session_params == {"id": "s2"}
    quoted = {"text": f'{LARGE} "session_params": {{"id": "no"}}', "stop": ["session_params"], **body}
    assert read_fields(json.dumps(quoted).encode()).session_params == {"id": "s2"}


@pytest.mark.parametrize("text", ["", LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'"session_id"', b"\xff\xfe", b'{"session_id": "\xff"}', b'{"id": ' + b"[" * 10**5,
     b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", b'{"session_id": "\\ud800"}', b'{"id": 1e999}',
     b'{"min_weight_version": ' + b"9" * 5000 + b"}", gzip.compress(mtime=0, data=b'{"session_id": "x"}')],
    ids=range(13),
)  # fmt: skip
def test_any_bytes_have_fields(body: bytes, text: str) -> None:
    request = asking(body + text.encode())
    assert request.fields.session_id is None
    assert request.hint is None and request.session_name is None and not request.must_be_session
    assert isinstance(request.demand, str) and request.tokens > 0 and request.blocks is not None


def test_a_field_that_cannot_be_read_does_not_hide_the_others() -> None:
    found = read_fields(b'{"id": 1e999, "session_params": {"id": "s"}, "session_id": 1e999, "conversation_id": "c"}')
    assert (found.id, found.session_id) == (None, None)
    assert (found.session_params, found.conversation_id) == ({"id": "s"}, "c")


@pytest.mark.parametrize(
    ("body", "headers", "hint"),
    [
        ({"session_id": "a", "conversation_id": "b"}, {"x_smg_routing_key": "c"}, "a"),
        ({"conversation_id": "b"}, {"x_smg_routing_key": "c"}, "b"),
        ({"session_params": {"id": "p"}}, {"x_smg_routing_key": "c"}, "p"),
        ({}, {"x_smg_routing_key": "c", "x_session_id": "d"}, "c"),
        ({}, {"x_session_id": "d"}, "d"),
        ({"session_id": "", "conversation_id": 3}, {}, None),
        ({"session_params": [1]}, {}, None),
        ({"session_params": {"id": 3}}, {}, None),
    ],
)
def test_the_name_of_a_conversation(body: dict[str, Any], headers: dict[str, str], hint: str | None) -> None:
    assert asking(body, **headers).hint == hint


def test_the_size_of_a_prompt_is_not_believed() -> None:
    request = asking({}, x_verl_prompt_bytes="9" * 15)
    assert request.packed == len(request.body) and request.tokens < 1000
    for odd in ("-4", "x", "²", "", "9" * 16):
        assert asking({}, x_verl_prompt_bytes=odd).packed == 0
    assert asking({"session_id": "s"}, packed=b"\0" * 400).fields.session_id == "s"


BODIES = {
    "no JSON": b"{",
    "empty": b"",
    "no object": b"[]",
    "binary": bytes(range(256)) * 10,
    "gzip": gzip.compress(mtime=0, data=b'{"text": "x"}'),
    "deep": b'{"text": ' + b"[" * 10**5,
}


@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/sessions", "/close_session"])
def test_a_body_that_a_server_refuses_is_refused_by_a_server(name: str, path: str) -> None:
    async def scenario() -> None:
        server = FakeServer(api_key="k")
        server.answers[path] = refused(400, "the server's words", "BadRequestError")
        async with running(server) as fleet:
            sent = {"content-encoding": "gzip"} if name == "gzip" else {}
            answer = await fleet.post(path, BODIES[name], headers=sent | {"authorization": "Bearer k"})
            assert answer.status_code == 400 and "the server's words" in answer.text
            assert server.received[-1].body == BODIES[name]
            assert server.received[-1].headers.get("content-encoding") == sent.get("content-encoding")

    run(scenario())


@pytest.mark.parametrize("path", ["/generate", "/v1/messages", "/v1/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large(path: str, declared: bool) -> None:
    async def scenario() -> None:
        server = FakeServer()
        async with running(server, max_request_bytes=1000) as fleet:

            async def pieces() -> Any:
                for _ in range(11):
                    yield b"x" * 100

            content: Any = b"x" * 1001 if declared else pieces()
            answer = await fleet.client.post(path, content=content)
            assert answer.status_code == 413 and "--max-request-bytes" in answer.text
            assert answer.headers["x-verl-error"] == "BadRequestError" and "error" in answer.json()
            assert (await fleet.post(path, b"x" * 1000)).status_code == 200
            assert [len(each.body) for each in server.received] == [1000]

    run(scenario())


def test_too_many_bytes_at_once_are_refused() -> None:
    async def scenario() -> None:
        server = FakeServer()
        async with running(server, max_held_bytes=1000) as fleet:
            fleet.router._held = 1001
            answer = await fleet.post("/generate")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert "--max-held-bytes" in answer.text
            fleet.router._held = 0
            assert (await fleet.post("/generate")).status_code == 200
            assert fleet.router._held == 0

    run(scenario())
