"""Every answer and every event of OpenAI's routes has the types that OpenAI publishes, compared strictly."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

from tests.server.dialects.openai.conftest import MESSAGES, Caller
from tests.server.dialects.openai.test_tools import CALL, CHAT, TOOL, thinking
from verl_server.messages.io_struct import FinishReason

__all__ = ["thinking"]

RESPONSES, COMPLETIONS = "/v1/responses", "/v1/completions"
FUNCTION = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
TEXTS = ("Hello!", f"Let me see.\n{CALL}", "<think>\nhm\n</think>\n\nFive.", "")


_adapter = functools.cache(TypeAdapter)


def check(kind: Any, value: Any) -> None:
    """Raise pydantic's ValidationError if a value has another type: no conversion, and nothing missing."""
    _adapter(kind).validate_python(value, strict=True)


def with_integer_times(response: Any) -> Any:
    """Return a response whose times are integers: OpenAI sends them so, and its types permit more."""
    for name in ("created_at", "completed_at"):
        assert isinstance(response[name], int | None), name
    return response


def frames(call: Caller, path: str, **body: Any) -> Iterator[Any]:
    """Yield the decoded frames of a stream, with or without names of events."""
    for line in call.stack.post(path, body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.fixture(params=["plain", "reasoning"])
def caller(request: pytest.FixtureRequest, call: Caller, thinking: Caller) -> Iterator[Caller]:
    made = call if request.param == "plain" else thinking
    yield made
    made.stack.scheduler.script = made.stack.scheduler.chunk = None


@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("cut", [False, True], ids=["", "cut"])
def test_chats(caller: Caller, cut: bool, tools: bool, logprobs: bool) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "n": 2, "return_token_ids": True, "store": True}
    body |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    body |= {"tools": [TOOL]} if tools else {}
    for text in TEXTS:
        (caller.cuts if cut else caller.says)(text or " ", 3)
        check(ChatCompletion, caller.post(CHAT, **body))
        usage = {"include_usage": True, "continuous_usage_stats": True}
        for chunk in frames(caller, CHAT, **body, stream_options=usage):
            check(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("cut", [False, True], ids=["", "cut"])
def test_responses(caller: Caller, cut: bool, tools: bool, logprobs: bool) -> None:
    body: dict[str, Any] = {"input": "hi", "metadata": {"a": "b"}, "instructions": "x", "reasoning": {"effort": "low"}}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if logprobs else {}
    body |= {"tools": [FUNCTION]} if tools else {}
    for text in TEXTS:
        (caller.cuts if cut else caller.says)(text or " ", 3)
        check(Response, with_integer_times(caller.post(RESPONSES, **body)))
        for event in frames(caller, RESPONSES, **body):
            check(ResponseStreamEvent, event)
            with_integer_times(event.get("response", {"created_at": 0, "completed_at": 0}))


@pytest.mark.parametrize("logprobs", [None, 2])
def test_completions(call: Caller, logprobs: int | None) -> None:
    call.says("Hello!", 3)
    body: dict[str, Any] = {"prompt": ["ab", "cd"], "max_tokens": 50, "logprobs": logprobs}
    check(Completion, call.post(COMPLETIONS, **body))
    echoed = call.post(COMPLETIONS, **body, echo=True)
    for choice in echoed["choices"]:
        _check_first_token(choice)
    check(Completion, echoed)
    for chunk in frames(call, COMPLETIONS, **body, stream_options={"include_usage": True}):
        for choice in chunk["choices"]:  # OpenAI sends null until the end, which its type of a whole answer has not
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(Completion, chunk)


def _check_first_token(choice: Any) -> None:
    """Check that the first token of a prompt has no log-probability, as OpenAI documents, and complete it."""
    if (logprobs := choice["logprobs"]) is not None:
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}


def test_models(call: Caller) -> None:
    (model,) = call.stack.get("/v1/models").json()["data"]
    check(Model, model)
    check(Model, call.stack.get(f"/v1/models/{model['id'].strip('/')}").json())


@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")], ids=lambda value: value
)
def test_errors(call: Caller, path: str, prompt: str) -> None:
    def of(text: str) -> dict[str, Any]:
        return {prompt: text if prompt != "messages" else [{"role": "user", "content": text}]}

    check(ErrorObject, call.refusal(path, **of("a"), temperature=-1))
    check(ErrorObject, call.refusal(path, **of("a" * 300)))
    missing = call.stack.post(path, of("a") | {"model": "a:adapter"})
    assert missing.status_code == 404
    check(ErrorObject, missing.json()["error"])


@pytest.mark.parametrize("status", [503, 400, None])
def test_answers_that_break_off(call: Caller, monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
    """A failure is an error of the published type. An aborted response has the status "cancelled"."""
    scheduler = call.stack.scheduler
    reason = FinishReason(type="abort", message="Ended.", status_code=status, code="our_code" if status else None)

    def end(running: Any) -> None:
        scheduler.running.pop(running.req.rid, None)
        scheduler.emit(running, call.text.encode("Hi"), reason)

    monkeypatch.setattr(scheduler, "_step", end)
    *_, last = frames(call, RESPONSES, input="hi")
    check(ResponseStreamEvent, last)
    assert last["type"] == ("response.failed" if status else "response.incomplete")
    if status is None:
        whole = call.post(RESPONSES, input="hi")
        check(Response, whole)
        assert whole["status"] == last["response"]["status"] == "cancelled"
        return
    *_, frame = frames(call, CHAT, messages=MESSAGES)
    check(ErrorObject, frame["error"])
