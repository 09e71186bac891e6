"""What the scheduler is told of sessions, so that the prefix cache keeps the histories that are used again."""

from __future__ import annotations

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.io_struct import FinishSessionReq, TokenizedGenerateReq
from verl_server.server.app import create_app
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
