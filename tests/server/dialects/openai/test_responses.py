"""/v1/responses, read by the types of the openai package."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.dialects.openai.conftest import MESSAGES, Caller
from tests.server.dialects.openai.test_tools import CALL, thinking
from verl_server.messages.io_struct import FinishReason

__all__ = ["thinking"]

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}


def client_of(call: Caller) -> openai.OpenAI:
    """Return the package's synchronous client, whose requests go to the application without a socket."""

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"content-type": "application/json"}
        got = call.stack.request(request.method, request.url.path, content=request.content, headers=headers)
        return httpx.Response(got.status_code, headers=got.headers, content=got.content)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0)


@pytest.fixture
def client(call: Caller) -> Iterator[openai.OpenAI]:
    with client_of(call) as made:
        yield made


def test_a_response(call: Caller, client: openai.OpenAI) -> None:
    call.says("Hello!")
    response = client.responses.create(model="m", input="hi", instructions="Be kind", metadata={"a": "b"})
    assert response.output_text == "Hello!" and response.status == "completed" and response.id.startswith("resp_")
    assert response.instructions == "Be kind" and response.text is not None and response.text.verbosity == "medium"
    assert response.store is False
    assert response.metadata == {"a": "b"} | {name: "default" for name in ("weight_version", "weight_version_start")}
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(call.sent().input_ids), 7)
    prompt = call.text.decoder(False)(call.sent().input_ids)
    assert prompt == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_store_is_accepted_and_nothing_is_stored(call: Caller) -> None:
    call.says("Hello!")
    for stored in (True, False, None):
        response = call.post("/v1/responses", input="hi", store=stored)
        assert response["store"] is False
        chat = call.chat(store=stored)
        first, *others = call.stream("/v1/chat/completions", messages=MESSAGES, store=stored)
        assert chat.get("store") is first.get("store") is (None if stored is None else False)
        assert not any("store" in frame for frame in others)
    refusal = call.refusal("/v1/responses", input="x", previous_response_id=response["id"])
    assert "stored in sessions only" in refusal["message"]


def test_a_cut_response_is_incomplete(call: Caller, client: openai.OpenAI) -> None:
    call.cuts("Hello!")
    response = client.responses.create(model="m", input="hi", max_output_tokens=6)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens" and call.sent().sampling.max_new_tokens == 6


def test_calls_and_their_outputs(call: Caller, client: openai.OpenAI) -> None:
    call.says(f"Let me see.\n{CALL}")
    first = client.responses.create(model="m", input="hi", tools=[TOOL])
    message, made = first.output
    assert message.type == "message" and made.type == "function_call"
    assert (made.name, made.arguments) == ("add", '{"a": 1}') and first.output_text == "Let me see."
    call.says("2")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": made.call_id, "output": "2"},
    ]
    assert client.responses.create(model="m", input=items).output_text == "2"
    prompt = call.text.decoder(False)(call.sent().input_ids)
    assert "assistant\nLet me see.<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in prompt
    client.responses.create(model="m", input="x", tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert "add" in call.sent().grammar


@pytest.mark.parametrize("chunk", [1, None])
def test_the_events_of_a_stream(call: Caller, client: openai.OpenAI, chunk: int | None) -> None:
    call.says(f"Let me see.\n{CALL}", chunk)
    events = list(client.responses.create(model="m", input="hi", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deduplicated = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert deduplicated == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    last = events[-1]
    assert last.type == "response.completed" and (text, arguments) == ("Let me see.", '{"a": 1}')
    assert last.response.output_text == text and last.response.output[1].type == "function_call"


def test_the_streaming_helper_of_the_package(call: Caller, client: openai.OpenAI) -> None:
    call.says("Hello!", chunk=1)
    with client.responses.stream(model="m", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello!"


def test_reasoning_is_an_item(thinking: Caller) -> None:
    thinking.says("<think>\nhm hm\n</think>\n\nFive.", chunk=1)
    with client_of(thinking) as client:
        whole = client.responses.create(model="m", input="hi", reasoning={"effort": "low"})
        events = list(client.responses.create(model="m", input="hi", stream=True))
        again = client.responses.create(model="m", input=[item.model_dump() for item in whole.output])  # type: ignore[misc]
    reasoning, message = whole.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and reasoning.content[0].text == "hm hm"
    assert message.type == "message" and whole.output_text == again.output_text == "Five."
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm hm"
    assert "<think>\nhm hm\n</think>\nFive." in thinking.text.decoder(False)(thinking.sent().input_ids)


@pytest.mark.parametrize("read", ["whole", "stream"])
def test_logprobs_belong_to_the_message(thinking: Caller, read: str) -> None:
    thinking.says("<think>hm</think>Five.", chunk=1)
    with client_of(thinking) as client:
        asked: dict[str, Any] = {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]}
        if read == "whole":
            response = client.responses.create(**asked, top_logprobs=1)
        else:
            response = list(client.responses.create(**asked, top_logprobs=1, stream=True))[-1].response
    part: Any = response.output[1].content[0]
    assert "".join(entry.token for entry in part.logprobs).endswith("Five.")
    assert "hm" not in "".join(entry.token for entry in part.logprobs)
    assert len(part.logprobs[0].top_logprobs) == 1


def data_url(text: str, media_type: str = "text/plain") -> str:
    return f"data:{media_type};base64,{base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"file_data": data_url("Römisch"), "filename": "rome.txt"}, "rome.txt\nRömisch"),
        ({"file_data": data_url("x", "text/markdown;charset=utf-8"), "filename": None}, "x"),
        ({"file_data": data_url("{}", "application/json")}, "{}"),
    ],
)
def test_a_file_of_text_is_its_text(call: Caller, file: dict[str, Any], text: str) -> None:
    call.post("/v1/responses", input=[{"role": "user", "content": [{"type": "input_file", **file}]}])
    prompt = call.text.decoder(False)(call.sent().input_ids)
    assert f"<|im_start|>user\n{text}<|im_end|>" in prompt
    call.chat(messages=[{"role": "user", "content": [{"type": "file", "file": file}]}])
    assert call.text.decoder(False)(call.sent().input_ids) == prompt


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"file_id": "file-1"}, "stores and fetches no files"),
        ({"file_url": "http://x/a.txt"}, "stores and fetches no files"),
        ({"file_data": data_url("x", "application/pdf")}, "not text"),
        ({"file_data": "SGVsbG8="}, "not text"),
        ({"file_data": "data:text/plain;base64,!"}, "not UTF-8 text in base64"),
        ({"file_data": "data:text/plain;base64,/w=="}, "not UTF-8 text in base64"),
    ],
)
def test_other_files_are_refused(call: Caller, file: dict[str, Any], says: str) -> None:
    items = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    message = call.refusal("/v1/responses", input=items)["message"]
    assert message.startswith("input[0].content has a file") and says in message
    messages = [{"role": "user", "content": [{"type": "file", "file": file}]}]
    assert says in call.refusal("/v1/chat/completions", messages=messages)["message"]


def test_formats(call: Caller, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    call.says("{}")
    assert client.responses.create(model="m", input="hi", text={"format": form}).output_text == "{}"
    assert call.sent().grammar


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"regex": "a+"}, "/a+/"),
        ({"ebnf": 'start: "ab"'}, 'start: \\"ab\\"'),
        ({"json_schema": {"enum": ["ab"]}}, "ab"),
    ],
)
def test_constraints_of_sglang(call: Caller, fields: dict[str, Any], grammar: str) -> None:
    call.says(CALL)
    call.post("/v1/responses", input="hi", **fields)
    assert grammar in call.sent().grammar
    (item,) = call.post("/v1/responses", input="hi", tools=[TOOL], **fields)["output"]
    assert item["type"] == "function_call" and grammar in call.sent().grammar
    both = {"text": {"format": {"type": "json_object"}}}
    assert "constrain the output differently" in call.refusal("/v1/responses", input="hi", **fields | both)["message"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["everything"]}, "everything"),
        ({"input": []}, "input cannot be empty"),
        ({"input": [{"type": "function_call"}]}, "input[0] needs `name`"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_refused_responses(call: Caller, fields: dict[str, Any], says: str) -> None:
    assert says in call.refusal("/v1/responses", **{"input": "hi"} | fields)["message"]


def test_a_failed_stream_ends_with_an_event(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = call.stack.scheduler
    reason = FinishReason(type="abort", message="The queue is full.", status_code=503)
    monkeypatch.setattr(scheduler, "_step", lambda running: scheduler.emit(running, [], reason))
    frames = call.stack.post("/v1/responses", {"input": "hi", "stream": True}).text
    assert "event: response.failed" in frames and "The queue is full." in frames
    scheduler.running.clear()


@pytest.mark.parametrize("chunk", [1, None])
def test_a_format_beside_tools_leaves_the_choice(call: Caller, client: openai.OpenAI, chunk: int | None) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    body: Any = {
        "model": "m", "input": "hi", "tools": [TOOL],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }  # fmt: skip
    for text, kind in (('{"sum": 5}', "message"), (CALL, "function_call")):
        call.says(text, chunk)
        (item,) = client.responses.create(**body).output
        assert item.type == kind and (item.type != "message" or item.content[0].text == text)  # type: ignore[union-attr]
        assert "<tool_call>" in call.sent().grammar and '\\"sum\\"' in call.sent().grammar
        *_, last = client.responses.create(**body, stream=True)
        assert last.type == "response.completed" and [each.type for each in last.response.output] == [kind]
    forced = client.responses.create(**body, tool_choice="required")
    assert forced.output[0].type == "function_call" and "sum" not in call.sent().grammar
