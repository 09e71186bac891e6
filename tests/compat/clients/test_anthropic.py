"""The `anthropic` package: messages, streams, tools, thinking, token counts, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from conftest import Server

pytestmark = pytest.mark.client("anthropic", "anthropic")

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": "m", "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
"""Parameters of a greedy request. This version of the client has no parameter for the temperature."""
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", timeout=60, max_retries=0)


def create(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(**(GREEDY | options))


def prompt_tokens(message: Any) -> int:
    """Return all tokens of the prompt: Anthropic counts those that a cache held apart."""
    usage = message.usage
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0))


def test_message(client: anthropic.Anthropic) -> None:
    """A message: greedy twice alike, usage, a system prompt makes the prompt longer."""
    first, second = create(client), create(client)
    assert first.content[0].type == "text" and first.content[0].text == second.content[0].text
    assert first.role == "assistant" and first.stop_reason in ("max_tokens", "end_turn")
    assert 0 < first.usage.output_tokens <= 24
    assert prompt_tokens(create(client, system="Be brief.")) > prompt_tokens(first)


def test_stream(client: anthropic.Anthropic) -> None:
    """A stream: its events join to the plain message, in the client's own accumulator."""
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    plain = create(client)
    assert text == final.content[0].text == plain.content[0].text
    assert final.stop_reason == plain.stop_reason and final.usage.output_tokens == plain.usage.output_tokens


def test_tools(client: anthropic.Anthropic) -> None:
    """Tools: a forced call fits the schema, plain and in a stream, and its result continues the conversation."""
    options: Any = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200}
    answer = create(client, **options)
    assert answer.stop_reason == "tool_use"
    call = next(block for block in answer.content if block.type == "tool_use")
    assert call.name == "get_weather" and call.input["city"] in ("Paris", "Rome") and 1 <= call.input["days"] <= 9
    with client.messages.stream(**(GREEDY | options)) as stream:
        streamed = stream.get_final_message()
    assert next(block.input for block in streamed.content if block.type == "tool_use") == call.input
    messages = [
        *HELLO,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    again = create(client, messages=messages, tools=[WEATHER], tool_choice={"type": "none"})
    assert prompt_tokens(again) > prompt_tokens(create(client)) and again.stop_reason != "tool_use"


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    """Stop sequences end the text before themselves, and are named."""
    text = create(client).content[0].text
    stop = text[3:5]
    answer = create(client, stop_sequences=[stop])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop
    assert answer.content[0].text == text[: text.index(stop)]


def test_count_tokens(client: anthropic.Anthropic) -> None:
    """`count_tokens` is what the message then counts, with tools too."""
    plain = client.messages.count_tokens(model="m", messages=HELLO).input_tokens
    assert plain == prompt_tokens(create(client))
    with_tools = client.messages.count_tokens(model="m", messages=HELLO, tools=[WEATHER]).input_tokens
    assert with_tools == prompt_tokens(create(client, tools=[WEATHER])) > plain


def test_thinking_settings(client: anthropic.Anthropic) -> None:
    """`thinking` is accepted; blocks of thinking are accepted in the history."""
    answer = create(
        client, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048, extra_body={"temperature": 1}
    )
    assert answer.content
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Hi."}],
        },
        {"role": "user", "content": "Again"},
    ]
    assert create(client, messages=messages).content


def test_errors(client: anthropic.Anthropic) -> None:
    """Bad values are `BadRequestError` in Anthropic's shape."""
    with pytest.raises(anthropic.BadRequestError) as refusal:
        create(client, extra_body={"temperature": -1})
    assert refusal.value.body["type"] == "error" and "temperature" in refusal.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError):
        create(client, messages=[])
