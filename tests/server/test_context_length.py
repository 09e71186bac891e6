"""A length that does not fit is refused with one code, by every route, and a session notes it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.fake_scheduler import INFO, Running
from verl_server.engine.http_answers import FrameReader, raise_for
from verl_server.errors import ContextLengthError, error_for_status
from verl_server.messages import io_struct
from verl_server.messages.columns import MSGPACK
from verl_server.messages.io_struct import PROMPT_HEADER, FinishReason
from verl_server.messages.packed import pack_ids
from verl_server.server.app import create_app
from verl_server.server.sessions.service import SessionService

OWNER = {"Authorization": "Bearer owner"}
CODE = "context_length_exceeded"
LISTS = {
    "litellm": "this model's maximum context length is",
    "verifiers": "this model's maximum context length is",
    "OpenAI": "This model's maximum context length is 256 tokens. However, ",
}
"""Project -> what its clients look for in a text of the context of 256 tokens."""

IDS = [5] * 300
CHAT = [{"role": "user", "content": "a" * 300}]
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "generate ids": ("/generate", {"input_ids": IDS}),
    "generate batch": ("/generate", {"input_ids": [[5], IDS]}),
    "generate text": ("/generate", {"text": "a" * 300}),
    "generate stream": ("/generate", {"input_ids": IDS, "stream": True}),
    "completion": ("/v1/completions", {"prompt": "a" * 300}),
    "completion ids": ("/v1/completions", {"prompt": IDS, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "chat stream": ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    "chat with max_tokens": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "a" * 300, "store": False}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    "messages stream": ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "stream": True}),
    "inference": ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 4}}),
}
"""Prompts that do not fit into the context of 256 tokens."""
BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 100}}),
    "completion": ("/v1/completions", {"prompt": [5] * 200, "max_tokens": 100}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 300}),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 300, "store": False}),
    "inference": ("/inference/v1/generate", {"token_ids": [5] * 200, "sampling_params": {"max_tokens": 100}}),
}
"""Prompts that fit, with outputs that do not. Anthropic's `max_tokens` is reduced instead."""
IN_SESSION = [name for name in LONG if name not in ("inference", "generate batch")]


def check(answer: Any) -> str:
    """Assert that an answer has the code, in its body and for the HTTP adapter. Return its text."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == CODE
    with pytest.raises(ContextLengthError) as caught:
        raise_for(answer)
    assert str(caught.value) == error["message"]
    del answer.headers["X-Verl-Error"]  # a proxy may remove it
    with pytest.raises(ContextLengthError):
        raise_for(answer)
    return str(error["message"])


@pytest.mark.parametrize("case", LONG)
def test_a_prompt_that_is_too_long(reset_stack: Stack, case: str) -> None:
    text = check(reset_stack.post(*LONG[case]))
    assert text.startswith("prompt is too long: ") and " tokens > 255 maximum. " in text, "Anthropic's words"
    assert all(part in text or part in text.lower() for part in LISTS.values())


@pytest.mark.parametrize("case", BOTH)
def test_an_output_that_is_too_long(reset_stack: Stack, case: str) -> None:
    text = check(reset_stack.post(*BOTH[case]))
    assert text.startswith(LISTS["OpenAI"]) and LISTS["litellm"] in text.lower()


def test_ids_beside_the_body(reset_stack: Stack) -> None:
    prompt = pack_ids(IDS)
    headers = {PROMPT_HEADER: str(len(prompt)), "Accept": MSGPACK}
    check(reset_stack.request("POST", "/generate", content=prompt + b"{}", headers=headers))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/generate"])
def test_more_text_than_is_tokenized(make_stack: MakeStack, path: str) -> None:
    stack = make_stack(max_text_length=100)
    body = {"text": "a" * 200} if path == "/generate" else {"messages": CHAT, "max_tokens": 4}
    text = check(stack.post(path, body))
    assert text.startswith(LISTS["OpenAI"]) and "(setting max_text_length)" in text


@pytest.fixture
def small_pool(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A server whose KV cache has 64 tokens."""
    monkeypatch.setitem(INFO, "max_req_input_len", 64)
    monkeypatch.setitem(INFO, "max_total_num_tokens", 64)
    return make_stack()


@pytest.mark.parametrize("case", ["generate ids", "chat", "messages", "inference"])
def test_a_prompt_that_the_kv_cache_cannot_hold(small_pool: Stack, case: str) -> None:
    assert "length is 65 tokens (the KV cache holds no more: raise max_total_tokens" in check(
        small_pool.post(*LONG[case])
    )


@pytest.mark.parametrize("case", ["generate", "completion", "inference"])
def test_an_output_that_the_kv_cache_cannot_hold(small_pool: Stack, case: str) -> None:
    path, body = BOTH[case]
    ids = next(name for name, value in body.items() if isinstance(value, list))
    assert "you requested 160 tokens: 60 in the prompt" in check(small_pool.post(path, body | {ids: [5] * 60}))


def test_an_output_of_anthropics_ends_where_the_kv_cache_does(small_pool: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000}
    answer = small_pool.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 65


def refuse(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scheduler refuse the length of each request."""
    emit = stack.scheduler.emit

    def refused(running: Running, tokens: list[int], reason: FinishReason | None) -> None:
        emit(running, [], FinishReason.refused(ContextLengthError.of(3, 9, 8)))

    monkeypatch.setattr(stack.scheduler, "emit", refused)


SHORT: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/completions", {"prompt": [5], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2, "store": False}),
]


@pytest.mark.parametrize(("path", "body"), SHORT)
def test_a_refusal_by_the_engine(stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str, body: Any) -> None:
    refuse(stack, monkeypatch)
    assert "length is 8 tokens" in check(stack.post(path, body))
    data = [line.removeprefix("data: ") for line in stack.post(path, body | {"stream": True}).text.splitlines()]
    frames = [orjson.loads(line) for line in data if line.startswith("{")]
    errors = [frame.get("error") or frame.get("response", {}).get("error") for frame in frames]
    assert [error["code"] for error in errors if error] == [CODE]


def test_a_refusal_in_a_stream_is_raised() -> None:
    with pytest.raises(ContextLengthError, match="no"):
        FrameReader().feed(b'data: {"error": {"message": "no", "code": "%s"}}\n\n' % CODE.encode())
    assert type(error_for_status(400, "no", code=CODE)) is ContextLengthError


# -- in a session ----------------------------------------------------------------------------------------------


class Sessions:
    """A server with sessions."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        stack.app = create_app(stack.manager, stack.args, SessionService(stack.manager, stack.args))

    def create(self, **body: Any) -> tuple[str, dict[str, str]]:
        """Return (id, headers of the agent)."""
        made = self.stack.post("/sessions", body, headers=OWNER).json()
        return made["id"], {"Authorization": f"Bearer {made['key']}"}

    def limit(self, session_id: str) -> str | None:
        limit: str | None = self.stack.get(f"/sessions/{session_id}", headers=OWNER).json().get("limit")
        return limit


@pytest.fixture
def sessions(make_stack: MakeStack) -> Sessions:
    return Sessions(make_stack(api_key="owner"))


def test_a_session_notes_a_prompt_that_is_too_long(sessions: Sessions) -> None:
    for case in IN_SESSION:
        session_id, agent = sessions.create()
        check(sessions.stack.post(*LONG[case], headers=agent))
        assert sessions.limit(session_id) == "max_context", case
        helper, agent = sessions.create()
        check(sessions.stack.post(*LONG[case], headers=agent | {"X-Session-Child": "helper"}))
        assert sessions.limit(helper) == "max_context", case


def test_a_session_notes_an_output_that_is_too_long(sessions: Sessions) -> None:
    for case in ("generate", "completion", "chat", "responses"):
        session_id, agent = sessions.create()
        check(sessions.stack.post(*BOTH[case], headers=agent))
        assert sessions.limit(session_id) == "max_context", case


def test_ids_beside_the_body_in_a_session(sessions: Sessions) -> None:
    session_id, agent = sessions.create()
    prompt = pack_ids(IDS)
    headers = agent | {PROMPT_HEADER: str(len(prompt))}
    check(sessions.stack.request("POST", "/generate", content=prompt + b"{}", headers=headers))
    assert sessions.limit(session_id) == "max_context"


@pytest.mark.parametrize(("path", "body"), SHORT)
def test_the_contexts_of_a_session_and_of_its_server(make_stack: MakeStack, path: str, body: Any) -> None:
    sessions = Sessions(make_stack(api_key="owner", max_session_turn_tokens=1))
    session_id, agent = sessions.create()
    assert "length is 1 tokens (max_session_turn_tokens)" in check(sessions.stack.post(path, body, headers=agent))
    assert sessions.limit(session_id) == "max_context"
    sessions = Sessions(make_stack(api_key="owner"))
    session_id, agent = sessions.create(limits={"max_context": 1})
    text = check(sessions.stack.post(path, body, headers=agent))
    assert f"length is 1 tokens (max_context of the session {session_id})" in text
    assert sessions.limit(session_id) == "max_context"


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_notes_a_refusal_by_the_engine(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    refuse(sessions.stack, monkeypatch)
    for path, body in SHORT:
        session_id, agent = sessions.create()
        assert CODE in sessions.stack.post(path, body | {"stream": stream}, headers=agent).text
        assert sessions.limit(session_id) == "max_context", path


def test_a_session_notes_an_output_that_fills_the_context(sessions: Sessions) -> None:
    session_id, agent = sessions.create()
    chat = {"messages": [{"role": "user", "content": "a"}]}
    answer = sessions.stack.post("/v1/chat/completions", chat | {"max_tokens": 3}, headers=agent)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert sessions.limit(session_id) is None, "the request's own limit"
    sessions.stack.scheduler.script = lambda req: [7] * (req.sampling.max_new_tokens or 0)
    answer = sessions.stack.post("/v1/chat/completions", chat, headers=agent)
    assert answer.json()["usage"]["total_tokens"] == 256
    assert sessions.limit(session_id) == "max_context"
    assert isinstance(sessions.stack.scheduler.received[0], io_struct.TokenizedGenerateReq)
