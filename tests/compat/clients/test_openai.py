"""The `openai` package: chat, completions, tools, structured outputs, responses, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from chat_tools import WEATHER
from conftest import Server
from pydantic import BaseModel

pytestmark = pytest.mark.client("openai", "openai")

HELLO: Any = [{"role": "user", "content": "Hello"}]
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    """The type into which a structured output is parsed."""

    correct: bool
    grade: int


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "m", "messages": HELLO, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return client.chat.completions.create(**(given | options))


def fits(call: Any) -> bool:
    """Return True if a call names a tool and its arguments fit the tool's schema."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        return arguments.keys() == {"city", "days"} and arguments["city"] in ("Paris", "Rome")
    return call.function.name == "get_time" and arguments in ({"zone": "CET"}, {"zone": "UTC"})


def test_models(client: openai.OpenAI, server: Server) -> None:
    """List and retrieve models; an unknown name is `NotFoundError`."""
    (model,) = client.models.list().data
    assert model.id == server.model and client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("nonsense")


def test_chat(client: openai.OpenAI) -> None:
    """Chat: greedy twice alike, usage adds up, `n` choices, finish reasons."""
    first, second = chat(client), chat(client)
    assert first.choices[0].message.content == second.choices[0].message.content != ""
    assert first.choices[0].finish_reason == "length" and first.usage.completion_tokens == 24
    assert first.usage.total_tokens == first.usage.prompt_tokens + 24
    several = chat(client, n=3, temperature=1.0, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2] and several.usage.completion_tokens == 72


def test_chat_stream(client: openai.OpenAI) -> None:
    """Chat stream: the deltas join to the plain answer, and the last chunk has the usage."""
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat(client).choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices


def test_chat_logprobs(client: openai.OpenAI) -> None:
    """Chat log-probabilities: one entry for each token, the greedy one leads its candidates with the same number."""
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 24
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.token == entry.top_logprobs[0].token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )


def test_completions(client: openai.OpenAI) -> None:
    """Completions: several prompts with `n`, token ids as prompts, `echo`, a stop string."""
    options: dict[str, Any] = {"model": "m", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=["ab", "cd"], n=2, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    echoed = client.completions.create(prompt="ab", echo=True, **options)
    assert echoed.choices[0].text == "ab" + answer.choices[0].text
    ids = client.completions.create(prompt=[70, 71, 72], **options)
    assert ids.usage is not None and ids.usage.prompt_tokens == 3
    text = answer.choices[0].text
    stopped = client.completions.create(prompt="ab", stop=text[2:4], **options)
    assert text.startswith(stopped.choices[0].text) and stopped.choices[0].finish_reason == "stop"


def test_completion_scores(client: openai.OpenAI) -> None:
    """Completions score a prompt: `echo` with `max_tokens=0` and `logprobs`."""
    answer = client.completions.create(model="m", prompt="score me", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "score me" and choice.logprobs is not None
    scores = choice.logprobs.token_logprobs
    assert (
        scores is not None
        and len(scores) == 8
        and scores[0] is None
        and all(s is not None and s < 0 for s in scores[1:])
    )


@pytest.mark.parametrize("choice", ["required", "named"])
def test_tools(client: openai.OpenAI, choice: str) -> None:
    """Tools: a forced call has arguments that fit the schema."""
    forced: Any = "required" if choice == "required" else {"type": "function", "function": {"name": "get_weather"}}
    options: Any = {"tools": [WEATHER, TIME], "tool_choice": forced, "temperature": 1.0, "seed": 3}
    answer = chat(client, parallel_tool_calls=False, max_tokens=200, **options)
    assert answer.choices[0].finish_reason in ("tool_calls", "stop"), answer
    (call,) = answer.choices[0].message.tool_calls
    assert fits(call) and (choice == "required" or call.function.name == "get_weather")


def test_parallel_tools(client: openai.OpenAI) -> None:
    """Parallel tool calls: each has an id, a name and arguments of its own."""
    answer = chat(client, tools=[WEATHER, TIME], tool_choice="required", max_tokens=300, temperature=1.0, seed=3)
    calls = answer.choices[0].message.tool_calls
    assert len({call.id for call in calls}) == len(calls) > 1
    assert all(fits(call) for call in calls[:-1]), "only the last call may be cut by max_tokens"
    assert answer.choices[0].finish_reason == "length" or fits(calls[-1])


def test_tool_stream(client: openai.OpenAI) -> None:
    """Tools in a stream: the pieces of the call join to the plain answer's call."""
    options: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "seed": 5}
    plain = chat(client, parallel_tool_calls=False, **options).choices[0].message.tool_calls[0]
    name, arguments, ids, reasons = "", "", set(), []
    for chunk in chat(client, parallel_tool_calls=False, stream=True, **options):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            ids |= {call.id} - {None}
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather" and json.loads(arguments) == json.loads(plain.function.arguments)
    assert len(ids) == 1 and reasons[-1] == "tool_calls"


def test_tool_results(client: openai.OpenAI) -> None:
    """Tools: the conversation goes on with the tool's result; `tool_choice="none"` answers in text."""
    call = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=200).choices[0].message.tool_calls[0]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = chat(client, messages=messages, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    assert answer.usage.prompt_tokens > chat(client, tools=[WEATHER], tool_choice="none").usage.prompt_tokens


def test_structured_output(client: openai.OpenAI) -> None:
    """`chat.completions.parse`: the output is an object of the given model; `json_object` is an object."""
    answer = client.chat.completions.parse(
        model="m", messages=HELLO, response_format=Answer, max_tokens=100, temperature=0.5, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    plain = chat(client, response_format={"type": "json_object"}, max_tokens=300, temperature=1.0, seed=2)
    if plain.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(plain.choices[0].message.content), dict)
    else:
        assert plain.choices[0].message.content.startswith("{")


def test_vllm_extensions(client: openai.OpenAI) -> None:
    """vLLM's extensions through `extra_body`: `top_k=0`, a regular expression, a choice, token ids."""
    extra = {"top_k": 0, "structured_outputs": {"choice": ["left", "right"]}, "return_token_ids": True}
    answer = chat(client, temperature=1.0, extra_body=extra)
    assert answer.choices[0].message.content in ("left", "right")
    assert answer.choices[0].model_extra["token_ids"]
    regex = {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}
    text = chat(client, temperature=1.0, extra_body=regex).choices[0].message.content
    assert len(text) == 6 and text[:3].isdigit() and text[3] == "-"


def test_responses(client: openai.OpenAI) -> None:
    """`responses.create` with `store=False`: text, usage, the same text in a stream."""
    options: Any = {"model": "m", "input": "Hello", "max_output_tokens": 16, "temperature": 0, "store": False}
    answer = client.responses.create(**options)
    assert answer.output_text and answer.usage is not None and answer.usage.output_tokens <= 16
    events = list(client.responses.create(stream=True, **options))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == answer.output_text
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")


def test_responses_with_a_function(client: openai.OpenAI) -> None:
    """`responses.create` with a function: the call's arguments fit the schema, and its output continues the input."""
    tool: Any = {"type": "function", "strict": True} | WEATHER["function"]  # type: ignore[operator]
    options: Any = {"model": "m", "tools": [tool], "max_output_tokens": 200, "temperature": 0, "store": False}
    answer = client.responses.create(input="Hello", tool_choice="required", **options)
    call = next(item for item in answer.output if item.type == "function_call")
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(input=[*HELLO, call.model_dump(), result], tool_choice="none", **options)
    assert again.output_text


def test_errors(client: openai.OpenAI) -> None:
    """Bad values are `BadRequestError` and name the field; so are fields that are not implemented."""
    for bad, name in (({"temperature": -1}, "temperature"), ({"top_p": 7}, "top_p"), ({"max_tokens": 0}, "max")):
        with pytest.raises(openai.BadRequestError, match=name):
            chat(client, **bad)
    with pytest.raises(openai.BadRequestError, match=r"audio|modalities"):
        chat(client, audio={"voice": "alloy", "format": "wav"}, modalities=["text", "audio"])


def test_many_at_once(server: Server) -> None:
    """64 concurrent chats of the asynchronous client, each with its own answer."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:

            async def one(number: int) -> str:
                answer = await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": f"Number {number}"}],
                    max_tokens=8,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                assert answer.usage is not None and answer.usage.completion_tokens == 8
                return answer.choices[0].message.content or ""

            return await asyncio.gather(*(one(number % 32) for number in range(64)))

    answers = asyncio.run(run())
    assert answers[:32] == answers[32:] and len(set(answers)) > 8
