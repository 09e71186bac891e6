"""What the scheduler is told of sessions, so that the prefix cache keeps the histories that are used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.errors import ServerDiedError
from verl_server.messages.io_struct import FinishSessionReq, TokenizedGenerateReq
from verl_server.server.app import create_app
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.sessions.service import SessionService

OWNER = {"Authorization": "Bearer owner"}
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture
def owned(make_stack: MakeStack) -> Stack:
    """A server with an owner's key and sessions."""
    stack = make_stack(api_key="owner")
    stack.app = create_app(stack.manager, stack.args, SessionService(stack.manager, stack.args))
    return stack


@pytest.mark.parametrize(("named", "hint"), [(None, ""), ("abc", "hint:abc"), ("x" * 300, "hint:" + "x" * 128)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", BODY),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}),
    ],
)
def test_the_header_is_a_hint_outside_of_a_session(
    reset_stack: Stack, path: str, body: object, named: str | None, hint: str
) -> None:
    answer = reset_stack.post(path, body, headers={} if named is None else {"X-Session-ID": named})
    assert answer.status_code == 200, answer.text
    (sent,) = reset_stack.scheduler.wait_for(TokenizedGenerateReq)
    assert sent.session_id == hint


GENERATE = ("/generate", BODY)
COMPLETION = ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
RESPONSE = ("/v1/responses", {"input": "a", "max_output_tokens": 2, "store": False})


def sent_ids(stack: Stack, count: int = 1) -> list[str]:
    """Return the session ids of the samples that the scheduler received, in the order of the prompts."""
    return [message.session_id for message in stack.scheduler.wait_for(TokenizedGenerateReq, count)]


@pytest.mark.parametrize(("path", "body"), [GENERATE, COMPLETION, CHAT, RESPONSE])
def test_the_field_precedes_the_header(reset_stack: Stack, path: str, body: dict[str, Any]) -> None:
    answer = reset_stack.post(path, body | {"session_id": "abc"}, headers={"X-Session-ID": "other"})
    assert answer.status_code == 200, answer.text
    assert sent_ids(reset_stack) == ["hint:abc"]


@pytest.mark.parametrize(("path", "body"), [GENERATE, COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"conversation_id": "c"}, "hint:c"),
        ({"conversation_id": "c", "session_id": "s"}, "hint:s"),
        ({"conversation_id": "c", "session_id": ""}, "hint:c"),
        ({"conversation_id": "", "session_id": None}, "hint:header"),
        ({"session_id": "x" * 128}, "hint:" + "x" * 128),
    ],
)
def test_the_session_precedes_the_conversation_and_the_header_comes_last(
    reset_stack: Stack, path: str, body: dict[str, Any], fields: dict[str, Any], hint: str
) -> None:
    answer = reset_stack.post(path, body | fields, headers={"X-Session-ID": "header"})
    assert answer.status_code == 200, answer.text
    assert sent_ids(reset_stack) == [hint]


def test_each_prompt_of_a_batch_has_its_own_hint(reset_stack: Stack) -> None:
    body = {"input_ids": [[5], [6], [7]], "sampling_params": {"max_new_tokens": 1}}
    lists = {"session_id": ["a", None, ""], "conversation_id": ["b", "c", None]}
    assert reset_stack.post("/generate", body | lists, headers={"X-Session-ID": "d"}).status_code == 200
    assert sent_ids(reset_stack, 3) == ["hint:a", "hint:c", "hint:d"]
    reset_stack.scheduler.received.clear()
    assert reset_stack.post("/generate", body | {"session_id": "e"}).status_code == 200
    assert sent_ids(reset_stack, 3) == ["hint:e"] * 3


def test_all_samples_of_a_prompt_have_its_hint(reset_stack: Stack) -> None:
    body = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1, "n": 2}, "session_id": ["a", "b"]}
    assert reset_stack.post("/generate", body).status_code == 200
    assert sent_ids(reset_stack, 4) == ["hint:a", "hint:a", "hint:b", "hint:b"]


@pytest.mark.parametrize(("path", "body"), [GENERATE, COMPLETION, CHAT, RESPONSE])
def test_an_agent_cannot_name_another_session(owned: Stack, path: str, body: dict[str, Any]) -> None:
    victim = owned.post("/sessions", {}, headers=OWNER).json()["id"]
    own = owned.post("/sessions", {}, headers=OWNER).json()
    key = {"Authorization": f"Bearer {own['key']}"}
    for named in (victim, "hint", f"hint:{victim}"):
        answer = owned.post(path, body | {"session_id": named}, headers=key)
        assert answer.status_code == 200, answer.text
    assert sent_ids(owned, 3) == [own["id"]] * 3


def test_an_owners_field_names_no_recorded_session(owned: Stack) -> None:
    recorded = owned.post("/sessions", {}, headers=OWNER).json()["id"]
    assert owned.post("/generate", BODY | {"session_id": recorded}, headers=OWNER).status_code == 200
    body, headers = BODY | {"session_id": "b", "conversation_id": "c"}, OWNER | {"X-Session-ID": recorded}
    assert owned.post("/generate", body, headers=headers).status_code == 200
    assert sent_ids(owned, 2) == [f"hint:{recorded}", recorded]
    assert owned.request("GET", f"/sessions/{recorded}", headers=OWNER).json()["turns"] == 1


def test_a_hint_in_this_process(reset_stack: Stack) -> None:
    request = GenerateReqInput.parse(BODY | {"session_id": "abc"})

    async def generate() -> None:
        async for _ in reset_stack.manager.generate_request(request):
            pass

    reset_stack.manager.run_sync(generate(), 20)
    assert sent_ids(reset_stack) == ["hint:abc"]


def test_a_turn_names_its_session_and_the_end_of_the_session_is_sent(owned: Stack) -> None:
    made = owned.post("/sessions", {}, headers=OWNER).json()
    key = {"Authorization": f"Bearer {made['key']}"}
    assert owned.post("/generate", BODY, headers=key | {"X-Session-ID": "another"}).status_code == 200
    child = key | {"X-Session-Child": "helper"}
    assert owned.post("/generate", BODY, headers=child).status_code == 200
    ids = [message.session_id for message in owned.scheduler.wait_for(TokenizedGenerateReq, 2)]
    assert ids == [made["id"], f"{made['id']}.helper"], "the key decides, not the header"
    assert not [m for m in owned.scheduler.received if isinstance(m, FinishSessionReq)]
    assert owned.post(f"/sessions/{made['id']}/finish", {}, headers=OWNER).status_code == 200
    ended = [message.session_id for message in owned.scheduler.wait_for(FinishSessionReq, 2)]
    assert sorted(ended) == ids


def test_a_deleted_session_has_ended_too(owned: Stack) -> None:
    made = owned.post("/sessions", {}, headers=OWNER).json()
    assert owned.request("DELETE", f"/sessions/{made['id']}", headers=OWNER).status_code in (200, 204)
    (ended,) = owned.scheduler.wait_for(FinishSessionReq)
    assert ended.session_id == made["id"]


def finished_ids(stack: Stack, count: int) -> list[str]:
    """Return the session ids that ended, in the order in which the scheduler learned of them."""
    return [message.session_id for message in stack.scheduler.wait_for(FinishSessionReq, count)]


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_close_session_ends_a_hint(reset_stack: Stack, method: str) -> None:
    for named in ("abc", "x" * 300, "abc"):
        answer = reset_stack.request(method, "/close_session", json={"session_id": named})
        assert (answer.status_code, answer.content) == (200, b"")
    assert finished_ids(reset_stack, 3) == ["hint:abc", "hint:" + "x" * 128, "hint:abc"]


def test_an_empty_hint_is_none_and_a_wrong_one_is_refused(reset_stack: Stack) -> None:
    assert reset_stack.post("/close_session", {"session_id": ""}).status_code == 200
    for wrong in ({}, {"session_id": ["a"]}, {"session_id": None}):
        answer = reset_stack.post("/close_session", wrong)
        assert answer.status_code == 400 and "session_id" in answer.text
    surrogate = reset_stack.request("POST", "/close_session", content=b'{"session_id": "\\ud800"}')
    assert surrogate.status_code == 400
    assert not [m for m in reset_stack.scheduler.received if isinstance(m, FinishSessionReq)]


def test_an_owner_closes_a_recorded_session_and_its_hint(owned: Stack) -> None:
    named = owned.post("/open_session", {"capacity_of_str_len": 1, "session_id": "mine"}, headers=OWNER).json()
    assert owned.post("/close_session", {"session_id": named}, headers=OWNER).status_code == 200
    assert finished_ids(owned, 2) == ["mine", "hint:mine"]
    assert owned.request("GET", "/sessions/mine", headers=OWNER).status_code == 404


def test_who_may_end_a_hint(make_stack: MakeStack) -> None:
    """Whoever may generate without a session may end a hint. Nobody but an owner ends a recorded session."""
    stack = make_stack(admin_api_key="owner")
    stack.app = create_app(stack.manager, stack.args, SessionService(stack.manager, stack.args))
    key = stack.post("/sessions", {"id": "a"}, headers=OWNER).json()["key"]
    stack.post("/sessions", {"id": "b"}, headers=OWNER)
    for name in ("a", "b", "c"):
        refused = stack.post("/close_session", {"session_id": name}, headers={"Authorization": f"Bearer {key}"})
        assert refused.status_code == 403
    assert not [m for m in stack.scheduler.received if isinstance(m, FinishSessionReq)]
    assert stack.post("/close_session", {"session_id": "a"}).status_code == 200
    assert finished_ids(stack, 1) == ["hint:a"]
    assert stack.request("GET", "/sessions/a", headers=OWNER).json()["state"] == "open"


def test_a_hint_needs_the_key_of_generation(owned: Stack) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert owned.post("/close_session", {"session_id": "a"}, headers=headers).status_code == 401
    assert not [m for m in owned.scheduler.received if isinstance(m, FinishSessionReq)]


def test_a_server_that_reads_its_store_closes_no_session(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(api_key="owner", session_store=str(tmp_path))
    stack.app = create_app(stack.manager, stack.args, SessionService(stack.manager, stack.args))
    answer = stack.post("/close_session", {"session_id": "a"}, headers=OWNER)
    assert answer.status_code == 503 and "session store" in answer.text


def test_nothing_is_sent_to_a_scheduler_that_has_ended(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.manager._refusal = ServerDiedError("gone")
    assert stack.post("/close_session", {"session_id": "a"}).status_code == 200
    stack.manager._refusal = None
    assert stack.post("/close_session", {"session_id": "b"}).status_code == 200
    assert finished_ids(stack, 1) == ["hint:b"]
