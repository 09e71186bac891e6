"""Answers as they are on the wire, compared strictly with the types that the vendors' packages publish.

The clients of these packages accept any answer, and leave wrong types to the caller.
"""

from __future__ import annotations

import functools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from chat_tools import WEATHER
from conftest import Server
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

openai_types = pytest.mark.client("openai", "openai")
anthropic_types = pytest.mark.client("anthropic", "anthropic")

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"type": "function"} | WEATHER["function"]
TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
VERSION = {"anthropic-version": "2023-06-01"}

_adapter = functools.cache(TypeAdapter)


def check(kind: Any, value: Any) -> None:
    """Raise pydantic's ValidationError if a value has another type: no conversion, and nothing missing."""
    _adapter(kind).validate_json(json.dumps(value), strict=True)


def send(server: Server, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Return (status, text of the answer)."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, content, {"Content-Type": "application/json"} | (headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def whole(server: Server, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    status, text = send(server, path, body, headers)
    assert status == 200, text
    return json.loads(text)


def streamed(server: Server, path: str, body: Any) -> Iterator[Any]:
    status, text = send(server, path, body | {"stream": True})
    assert status == 200, text
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2, "stream_options": {"include_usage": True}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "forced": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200},
    "cut": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60},
    "offered": {"tools": [WEATHER]},
    "schema": {"response_format": {"type": "json_object"}},
    "kept": {"store": True, "metadata": {"a": "b"}},
}


@openai_types
@pytest.mark.parametrize("options", OPTIONS)
def test_chats(server: Server, options: str) -> None:
    """A chat and each of its chunks have the published types."""
    body = {"model": "m", "messages": HELLO, "max_tokens": 24, "temperature": 0} | OPTIONS[options]
    check(ChatCompletion, whole(server, "/v1/chat/completions", {k: v for k, v in body.items() if "stream" not in k}))
    for chunk in streamed(server, "/v1/chat/completions", body):
        check(ChatCompletionChunk, chunk)


@openai_types
@pytest.mark.parametrize("logprobs", [None, 2])
def test_completions(server: Server, logprobs: int | None) -> None:
    """A completion and each of its chunks have the published types."""
    body: dict[str, Any] = {"model": "m", "prompt": ["Hello", "You"], "max_tokens": 8, "logprobs": logprobs}
    check(Completion, whole(server, "/v1/completions", body))
    for chunk in streamed(server, "/v1/completions", body):
        for choice in chunk["choices"]:  # OpenAI sends null until the end, which its type of a whole answer has not
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(Completion, chunk)


RESPONSE_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "forced": {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 200},
    "cut": {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60},
    "offered": {"tools": [FUNCTION]},
    "kept": {"store": True, "metadata": {"a": "b"}, "instructions": "Be brief."},
}


@openai_types
@pytest.mark.parametrize("options", RESPONSE_OPTIONS)
def test_responses(server: Server, options: str) -> None:
    """A response and each of its events have the published types, and its times are integers."""
    body = {"model": "m", "input": "Hello", "max_output_tokens": 24, "temperature": 0} | RESPONSE_OPTIONS[options]
    response = whole(server, "/v1/responses", body)
    check(Response, response)
    assert isinstance(response["created_at"], int) and isinstance(response["completed_at"], int)
    for event in streamed(server, "/v1/responses", body):
        check(ResponseStreamEvent, event)


@openai_types
def test_models(server: Server) -> None:
    """A model of OpenAI's list has the published type."""
    for model in whole(server, "/v1/models")["data"]:
        check(Model, model)
        check(Model, whole(server, f"/v1/models/{model['id'].strip('/')}"))


@openai_types
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_errors(server: Server, path: str) -> None:
    """An error has the published type."""
    status, text = send(server, path, {"model": "m"})
    assert status == 400
    check(ErrorObject, json.loads(text)["error"])


MESSAGE_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "forced": {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200},
    "cut": {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60},
    "offered": {"tools": [TOOL]},
    "stop": {"stop_sequences": ["e", "a", " ", "i", "o"]},
}


@anthropic_types
@pytest.mark.parametrize("options", MESSAGE_OPTIONS)
def test_messages(server: Server, options: str) -> None:
    """A message and each of its events have the published types."""
    body = {"model": "m", "messages": HELLO, "max_tokens": 24, "temperature": 0} | MESSAGE_OPTIONS[options]
    check(Message, whole(server, "/v1/messages", body))
    events = list(streamed(server, "/v1/messages", body))
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    for event in events:
        if event["type"] != "ping":  # the package leaves these out
            check(RawMessageStreamEvent, event)


@anthropic_types
def test_counts_models_and_errors_of_anthropic(server: Server) -> None:
    """Token counts, models and errors have the published types."""
    check(MessageTokensCount, whole(server, "/v1/messages/count_tokens", {"model": "m", "messages": HELLO}))
    page = whole(server, "/v1/models", headers=VERSION)
    (model,) = page["data"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (model["id"], model["id"], False)
    check(ModelInfo, model)
    check(ModelInfo, whole(server, f"/v1/models/{model['id'].strip('/')}", headers=VERSION))
    for path, body, expected in (("/v1/messages", {"model": "m"}, 400), ("/v1/models/nonsense", None, 404)):
        status, text = send(server, path, body, VERSION)
        assert status == expected
        check(ErrorResponse, json.loads(text))
