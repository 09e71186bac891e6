"""Anthropic's routes return what the anthropic client expects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.fake_scheduler import INFO, Running
from verl_server.messages import io_struct as io
from verl_server.server.dialects.anthropic.conversation import openai_tools

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}{{ newline }}{% endfor %}
{% for m in messages %}
[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ newline }}
{%- endfor %}
{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}
""".replace("newline", r"'\n'")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "get", "description": "Weather.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
ASK = [{"role": "user", "content": "hi"}]
CALL = (
    '<think>\nhm\n</think>\n\nOk.\n<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "n": 1.50}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def shared(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INFO, "context_length", 1024)
        patch.setitem(INFO, "max_req_input_len", 1023)
        stack = Stack(text_folder, chat_template=str(path), api_key="k", served_model_name="policy")
    yield stack
    stack.close()


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.scheduler.chunk = None
    shared.scheduler.received.clear()
    return shared


def say(stack: Stack, text: str) -> None:
    """Make the policy answer `text` and end."""
    stack.scheduler.script = lambda req: [*stack.text.encode(text), *list(req.stop_ids)[:1]]


def post(stack: Stack, path: str = "/v1/messages", **body: Any) -> Any:
    body = {"model": "m", "messages": ASK} | body
    if path == "/v1/messages":
        body = {"max_tokens": 200} | body
    return stack.post(path, body, headers={"x-api-key": "k", "anthropic-version": "2023-06-01"})


def end_with(stack: Stack, patch: pytest.MonkeyPatch, tokens: list[int], reason: io.FinishReason) -> None:
    """Make the scheduler end each request with these tokens and this reason."""

    def step(running: Running) -> None:
        stack.scheduler.running.pop(running.req.rid, None)
        stack.scheduler.emit(running, tokens, reason)

    patch.setattr(stack.scheduler, "_step", step)


def prompt(stack: Stack) -> str:
    """Return the text of the prompt that the scheduler received."""
    return stack.text.decoder(False)(stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].input_ids)


def sampling(stack: Stack) -> Any:
    return stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].sampling


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, and check that each one has its type on a line of its own."""
    found = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# -- messages -----------------------------------------------------------------------------------------------


def test_a_message(stack: Stack) -> None:
    say(stack, "Hello!")
    response = post(stack, system="S", temperature=0.5, top_k=0)
    answer = response.json()
    assert response.headers["request-id"] == answer["id"] and answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "text", "text": "Hello!", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(stack.text.encode("[system]S\n[user]hi\n[assistant]")),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
        },
    }
    assert prompt(stack) == "[system]S\n[user]hi\n[assistant]"
    assert sampling(stack).temperature == 0.5 and sampling(stack).max_new_tokens == 200


def test_a_message_with_thinking_text_and_a_call(stack: Stack) -> None:
    say(stack, CALL)
    response = post(stack, tools=TOOLS)
    answer = response.json()
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": answer["id"]} and text["text"] == "Ok."
    assert call.pop("id") and call == {"type": "tool_use", "name": "get", "input": {"city": "Rome", "n": 1.5}}
    assert '"n": 1.50' in response.text  # the arguments are the policy's own text
    assert answer["stop_reason"] == "tool_use"
    function = {"name": "get", "description": "Weather.", "parameters": SCHEMA}
    assert json.loads(prompt(stack).split("\n")[0]) == {"type": "function", "function": function}


def test_a_whole_conversation_is_rendered(stack: Stack) -> None:
    say(stack, "Sunny.")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]}
    calls = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "Ok."},
        {"type": "tool_use", "id": "1", "name": "get", "input": {"city": "Rome"}},
    ]
    messages = [
        *ASK,
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    system = [{"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]
    assert post(stack, messages=messages, system=system).status_code == 200
    assert prompt(stack) == (
        "[system]A\nB\n[user]hi\nthere\n"
        '[assistant]<think>hm</think>Ok.<tool_call>{"name": "get", "arguments": {"city": "Rome"}}</tool_call>\n'
        "[tool]sun\n[user]And?\n[assistant]"
    )


def test_a_last_message_of_the_assistant_is_continued(stack: Stack) -> None:
    say(stack, " done")
    assert (
        post(stack, messages=[*ASK, {"role": "assistant", "content": "Well"}]).json()["content"][0]["text"] == " done"
    )
    assert prompt(stack) == "[user]hi\n[assistant]Well"


@pytest.mark.parametrize(
    ("thinking", "end"),
    [
        (None, "[assistant]"),
        ({"type": "enabled", "budget_tokens": 1024}, "[assistant]"),
        ({"type": "adaptive"}, "[assistant]"),
        ({"type": "disabled"}, "[assistant]<think></think>"),
    ],
)
def test_thinking_sets_the_templates_variable(stack: Stack, thinking: Any, end: str) -> None:
    say(stack, "Hello!")
    assert post(stack, thinking=thinking).status_code == 200
    assert prompt(stack).endswith(f"\n{end}")


def test_omitted_thinking(stack: Stack) -> None:
    say(stack, CALL)
    thinking = {"type": "adaptive", "display": "omitted"}
    assert post(stack, thinking=thinking).json()["content"][0]["thinking"] == ""
    assert "thinking_delta" not in post(stack, thinking=thinking, stream=True).text


# -- why a message ends ---------------------------------------------------------------------------------------


def test_a_stop_sequence_is_named(stack: Stack) -> None:
    say(stack, "a b STOP c")
    answer = post(stack, stop_sequences=["x", "STOP"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    assert answer["content"][0]["text"] == "a b "


def test_max_tokens_and_a_full_context(stack: Stack) -> None:
    stack.scheduler.script = lambda req: stack.text.encode("a") * (req.sampling.max_new_tokens or 0)
    assert post(stack, max_tokens=3).json()["stop_reason"] == "max_tokens"
    answer = post(stack, max_tokens=100_000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 1024
    assert post(stack, max_tokens=0).json()["content"] == []


def test_an_aborted_message_can_be_continued(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(stack, monkeypatch, stack.text.encode("We"), io.FinishReason(type="abort", message="Aborted."))
    answer = post(stack).json()
    assert answer["stop_reason"] == "pause_turn" and answer["content"][0]["text"] == "We"


# -- documents ------------------------------------------------------------------------------------------------

TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "Rome is old."}
TEXT_BLOCK = {"type": "text", "text": "Look:"}
DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"source": TEXT_SOURCE}, "Rome is old."),
    ({"source": TEXT_SOURCE, "title": "Rome", "context": "A guide.", "citations": {"enabled": False}},
     "Rome\nA guide.\nRome is old."),
    ({"source": {"type": "content", "content": "Old."}, "title": None, "cache_control": {"type": "ephemeral"}}, "Old."),
    ({"source": {"type": "content", "content": [{"type": "text", "text": each} for each in "ab"]}}, "a\nb"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), DOCUMENTS)
def test_a_document_of_text_is_its_text(stack: Stack, fields: dict[str, Any], text: str) -> None:
    say(stack, "Yes.")
    document = {"type": "document", **fields}
    found = {"type": "search_result", "title": "Rome", "source": "http://r", "content": [{"type": "text", "text": "c"}]}
    user = {"role": "user", "content": [document, found, {"type": "text", "text": "Is it?"}]}
    assert post(stack, messages=[user]).status_code == 200
    assert prompt(stack) == f"[user]{text}\nRome\nhttp://r\nc\nIs it?\n[assistant]"
    call = {"type": "tool_use", "id": "1", "name": "get", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [document, found]}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert post(stack, messages=messages, tools=TOOLS).status_code == 200
    assert f"[tool]{text}\nRome\nhttp://r\nc\n" in prompt(stack)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}, "source.type 'base64'"),
        ({"source": {"type": "url", "url": "http://x"}}, "source.type 'url'"),
        ({"source": {"type": "file", "file_id": "f"}}, "source.type 'file'"),
        ({"source": {"type": "content", "content": [{"type": "image"}]}}, "source.content[0]"),
        ({"source": {"type": "text"}}, "source.data"),
        ({}, "source.type None"),
        ({"source": TEXT_SOURCE, "citations": {"enabled": True}}, "citations"),
    ],
)
def test_other_documents_are_refused(stack: Stack, fields: dict[str, Any], says: str) -> None:
    refused = post(stack, messages=[{"role": "user", "content": [{"type": "document", **fields}]}])
    assert refused.status_code == 400
    assert f"messages[0].content[0].document.{says}" in refused.json()["error"]["message"]


MEDIA: list[dict[str, Any]] = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}},
]


@pytest.mark.parametrize("block", MEDIA, ids=lambda block: str(block["type"]))
def test_an_image_of_a_tool_is_a_line_of_text(stack: Stack, block: dict[str, Any]) -> None:
    say(stack, "I see.")
    call = {"type": "tool_use", "id": "1", "name": "get", "input": {}}
    content = [{"type": "text", "text": "a.png"}, block]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": False}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert post(stack, messages=messages, tools=TOOLS).status_code == 200
    kind = block["type"]
    assert f"[tool]a.png\n[{kind}: left out, because the model reads text only]\n[assistant]" in prompt(stack)


@pytest.mark.parametrize("block", MEDIA, ids=lambda block: str(block["type"]))
def test_a_refused_image_is_found_by_its_place(stack: Stack, block: dict[str, Any]) -> None:
    """Claude Code reads the place of an image in the error, leaves the image out and repeats the request."""
    messages = [*ASK, {"role": "assistant", "content": "a"}, {"role": "user", "content": [TEXT_BLOCK, block]}]
    refused = post(stack, messages=messages)
    place = re.search(r"messages\[(\d+)\]\.content\[(\d+)\]\.(image|document)", refused.json()["error"]["message"])
    assert refused.status_code == 400 and place is not None and place.groups() == ("2", "1", block["type"])


# -- tools that Claude Code and the SDKs declare --------------------------------------------------------------


def test_deferred_tools_are_offered_and_a_tool_search_is_left_out(stack: Stack) -> None:
    say(stack, "Hello!")
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    tool = TOOLS[0] | {"defer_loading": True, "eager_input_streaming": True, "input_examples": [{"city": "Rome"}]}
    call = {"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {"query": "weather"}}
    content = [{"type": "tool_reference", "tool_name": "get"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert post(stack, tools=[search, tool], messages=messages).status_code == 200
    first, *rest = prompt(stack).split("\n")
    description = 'Weather.\nExample: {"city": "Rome"}'
    function = {"name": "get", "description": description, "parameters": SCHEMA}
    assert json.loads(first) == {"type": "function", "function": function}
    assert rest[0] == "[user]hi" and "[tool]Found the tool get." in rest


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "restart"),
        ("text_editor_20250124", "str_replace_editor", "old_str"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "view_range"),
        ("memory_20250818", "memory", "new_path"),
    ],
)
def test_a_tool_of_anthropics_that_the_client_executes_is_a_function(kind: str, name: str, parameter: str) -> None:
    (tool,) = openai_tools([{"type": kind, "name": name, "max_characters": 100}])
    function = tool["function"]
    assert tool["type"] == "function" and function["name"] == name and function["description"]
    assert parameter in function["parameters"]["properties"] and "command" in function["parameters"]["properties"]


def test_such_a_tool_is_called(stack: Stack) -> None:
    say(stack, '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    for choice in ({"type": "auto"}, {"type": "any"}):
        answer = post(stack, tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice=choice).json()
        (made,) = answer["content"]
        assert (made["name"], made["input"], answer["stop_reason"]) == ("bash", {"command": "ls"}, "tool_use")


def test_an_attribution_is_not_shown_to_the_policy(stack: Stack) -> None:
    say(stack, "Hello!")
    attribution = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3.456; cc_entrypoint=cli;"}
    for system, shown in (([attribution, {"type": "text", "text": "S"}], "[system]S\n"), ([attribution], "")):
        assert post(stack, system=system).status_code == 200
        assert prompt(stack) == f"{shown}[user]hi\n[assistant]"


def test_results_stand_in_the_order_of_their_calls(stack: Stack) -> None:
    say(stack, "Hello!")
    calls = [{"type": "tool_use", "id": each, "name": "get", "input": {"city": each}} for each in "abc"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": f"of {each}"} for each in "cab"]
    messages = [*ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": [*results, TEXT_BLOCK]}]
    assert post(stack, messages=messages, tools=TOOLS).status_code == 200
    assert "[tool]of a\n[tool]of b\n[tool]of c\n[user]Look:\n[assistant]" in prompt(stack)


# -- tool choices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get"}])
def test_a_forced_call_is_constrained(stack: Stack, choice: Any) -> None:
    say(stack, CALL)
    answer = post(stack, tools=TOOLS, tool_choice=choice).json()
    assert answer["stop_reason"] == "tool_use"
    assert stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar


def test_a_forced_call_has_no_reasoning_after_a_prompt_that_closes_it(stack: Stack) -> None:
    say(stack, CALL[CALL.index("<tool_call>") :])
    for thinking, has_reasoning in (("enabled", True), ("disabled", False)):
        answer = post(stack, tools=TOOLS, tool_choice={"type": "any"}, thinking={"type": thinking})
        assert answer.json()["stop_reason"] == "tool_use"
        grammar = stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar
        assert ("</think>" in grammar) == has_reasoning


def test_no_call_with_the_choice_none(stack: Stack) -> None:
    say(stack, CALL)
    answer = post(stack, tools=TOOLS, tool_choice={"type": "none"}).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["stop_reason"] == "end_turn" and "Weather" in prompt(stack)


def test_one_call_only(stack: Stack) -> None:
    say(stack, f"{CALL}\n{CALL[CALL.index('<tool_call>') :]}")
    several = post(stack, tools=TOOLS).json()
    single = post(stack, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in several["content"]].count("tool_use") == 2
    assert [block["type"] for block in single["content"]].count("tool_use") == 1
    assert (single["stop_reason"], single["stop_sequence"]) == ("tool_use", None)


def test_an_answer_of_a_schema_is_constrained(stack: Stack) -> None:
    say(stack, "{}")
    format = {"type": "json_schema", "schema": SCHEMA}
    assert post(stack, output_config={"format": format, "effort": "low"}).status_code == 200
    assert stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [({"regex": "(?s:.*)"}, True), ({"ebnf": "start: /(?s:.*)/"}, True), ({"json_schema": "false"}, False)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_of_text_may_describe_calls(
    stack: Stack, fields: dict[str, Any], is_served: bool, stream: bool
) -> None:
    say(stack, CALL)
    answer = post(stack, tools=TOOLS, stream=stream, **fields)
    if not is_served:
        assert answer.status_code == 400 and "constrained (json_schema)" in answer.json()["error"]["message"]
        return
    if stream:
        starts = [each["content_block"] for each in events(answer.text) if each["type"] == "content_block_start"]
    else:
        starts = answer.json()["content"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use"] and starts[2]["name"] == "get"
    assert "(?s:.*)" in stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), True, {}])
def test_a_schema_of_sglangs_field_is_that_of_the_format(stack: Stack, schema: Any) -> None:
    say(stack, '{"city": "Rome"}')
    grammars = []
    plain = json.loads(schema) if isinstance(schema, str) else {} if schema is True else schema
    format = {"format": {"type": "json_schema", "schema": plain}}
    both = {"json_schema": schema, "output_config": format}
    for body in ({"output_config": format}, {"json_schema": schema}, *([] if schema is True else [both])):
        assert post(stack, tools=TOOLS, **body).json()["content"][0]["text"] == '{"city": "Rome"}'
        grammars.append(stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar)
    assert grammars[0] and set(grammars) == {grammars[0]}


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize("single", [False, True])
def test_a_format_beside_tools_leaves_the_choice(stack: Stack, chunk: int | None, single: bool) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    choice = {"type": "auto", "disable_parallel_tool_use": single}
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = {"tools": TOOLS, "tool_choice": choice, "output_config": config}
    stack.scheduler.chunk = chunk
    call = CALL.replace("Ok.\n", "")
    for text, kinds in (('{"sum": 5}', ["text"]), ('<think>hm</think>{"sum": 5}', ["thinking", "text"]), (
        call, ["thinking", "tool_use"],
    )):  # fmt: skip
        say(stack, text)
        answer = post(stack, **body).json()
        assert [block["type"] for block in answer["content"]] == kinds
        assert answer["stop_reason"] == ("tool_use" if "tool_use" in kinds else "end_turn")
        grammar = stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar
        assert "<tool_call>" in grammar and '\\"sum\\"' in grammar and "</think>" in grammar
        assert ("<tool_call>" in str(sampling(stack).stop)) is False  # the grammar permits one call
        streamed = [e["content_block"]["type"] for e in events(post(stack, **body, stream=True).text) if
                    e["type"] == "content_block_start"]  # fmt: skip
        assert streamed == kinds
    for forced in ({"type": "any"}, {"type": "tool", "name": "get"}):
        say(stack, CALL)
        answer = post(stack, **body | {"tool_choice": forced}).json()
        assert answer["content"][-1]["type"] == "tool_use"
        assert '\\"sum\\"' not in stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1].grammar


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize(
    ("cut", "arguments"), [('"ge', {}), ('"city": "Ro', {}), ('"n": 1.5', {"city": "Rome"}), ("</tool", None)]
)
def test_a_forced_call_that_is_cut_is_a_call(
    stack: Stack, cut: str, arguments: dict[str, Any] | None, chunk: int | None
) -> None:
    text = CALL.replace("Ok.\n", "")
    text = text[: text.index(cut) + len(cut)]
    stack.scheduler.script, stack.scheduler.chunk = lambda req: stack.text.encode(text), chunk
    body: Any = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get"}, "max_tokens": len(text)}
    answer = post(stack, **body).json()
    thinking, made = answer["content"]
    assert thinking["thinking"] == "hm" and answer["stop_reason"] == "max_tokens"
    assert (made["type"], made["name"]) == ("tool_use", "get")
    assert made["input"] == ({"city": "Rome", "n": 1.5} if arguments is None else arguments)
    found = events(post(stack, **body, stream=True).text)
    assert [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"] == ["thinking", "tool_use"]
    parts = [e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("type") == "input_json_delta"]
    assert '{"city": "Rome", "n": 1.50}'.startswith("".join(parts))
    assert [e["delta"]["stop_reason"] for e in found if e["type"] == "message_delta"] == ["max_tokens"]


# -- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_a_stream_adds_up_to_the_message(stack: Stack, chunk: int | None) -> None:
    say(stack, CALL)
    stack.scheduler.chunk = chunk
    response = post(stack, tools=TOOLS, stream=True)
    found = events(response.text)
    assert response.headers["request-id"] == found[0]["message"]["id"]
    assert [e["type"] for e in found[:2]] == ["message_start", "ping"] and found[-1]["type"] == "message_stop"
    message = found[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    blocks: list[dict[str, Any]] = []
    is_open = False
    for each in found[2:-2]:
        if each["type"] == "content_block_start":
            assert not is_open and each["index"] == len(blocks)
            blocks.append(each["content_block"] | {"json": ""})
            is_open = True
        elif each["type"] == "content_block_stop":
            assert is_open and each["index"] == len(blocks) - 1
            is_open = False
        else:
            assert is_open and each["index"] == len(blocks) - 1
            delta = each["delta"]
            key = {
                "thinking_delta": "thinking", "signature_delta": "signature", "text_delta": "text",
                "input_json_delta": "partial_json",
            }[delta["type"]]  # fmt: skip
            blocks[-1]["json" if key == "partial_json" else key] += delta[key]
    assert not is_open
    thinking, text, call = blocks
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": message["id"], "json": ""}
    assert text["text"] == "Ok." and call["name"] == "get" and call["input"] == {}
    assert json.loads(call["json"]) == {"city": "Rome", "n": 1.5}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == len(CALL) + 1


def test_an_error_in_a_stream_is_an_event(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(stack, monkeypatch, [], io.FinishReason(type="abort", message="Torn.", status_code=503))
    (found,) = events(post(stack, stream=True).text)
    assert found == {"type": "error", "error": {"type": "overloaded_error", "message": "Torn."}}
    refused = post(stack)
    assert refused.status_code == 503 and refused.json() == found


# -- token ids, token counts, errors --------------------------------------------------------------------------


def test_token_ids_and_logprobs(stack: Stack) -> None:
    say(stack, "Hello!")
    answer = post(stack, return_token_ids=True, return_logprob=True).json()
    assert stack.text.decoder(True)(answer["token_ids"]) == "Hello!"
    assert answer["prompt_token_ids"] == stack.text.encode("[user]hi\n[assistant]")
    assert len(answer["token_logprobs"]) == len(answer["token_ids"]) and answer["weight_versions"][0]["start"] == 0
    last = events(post(stack, return_token_ids=True, stream=True).text)[-2]
    assert last["token_ids"] == answer["token_ids"]


def test_count_tokens(stack: Stack) -> None:
    say(stack, "Hello!")
    counted = post(stack, "/v1/messages/count_tokens", tools=TOOLS, system="S").json()
    assert counted == {"input_tokens": post(stack, tools=TOOLS, system="S").json()["usage"]["input_tokens"]}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages cannot be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be"),
        (user(5), "messages[0].content[0] must be an object with `type`"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].image is not supported"),
        (user({"type": "container_upload"}), "messages[0].content[0] has the type 'container_upload'"),
        (user({"type": "tool_use"}), "a user's message cannot have it"),
        (user({"type": "text"}), "messages[0].content[0].text must be a string"),
        (user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "x"}]}), "content[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0].image is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type 'web_search_20250305' is"),
        ({"tools": [{"type": "bash_latest", "name": "bash"}]}, "tools[0].type 'bash_latest' is not supported"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name must be a string"),
        ({"tools": [{"name": "get"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["x"]}]}, "tools[0].allowed_callers is not supported"),
        ({"tools": [{**TOOLS[0], "input_examples": "x"}]}, "tools[0].input_examples must be a list"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "name must be a string of 1 to 128"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type must be one of auto, any, tool, none"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "put"}}, "`put`, which is not in `tools`"),
        ({"tool_choice": {"type": "any"}}, "the request has no `tools`"),
        ({"thinking": {"type": "on"}}, "thinking.type must be"),
        ({"stop_sequences": [""]}, "stop_sequences cannot hold an empty string"),
        ({"mcp_servers": [{}]}, "Field `mcp_servers` is not supported"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"temperature": -1}, "temperature"),
        ({"regex": "a", "ebnf": 'start: "a"'}, "`regex` and `ebnf` constrain the output differently"),
        (
            {"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "`output_config.format` and",
        ),
        ({"regex": "("}, "regex"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}, "regex": "a"}, "in another way (regex)"),
    ],
)
def test_a_wrong_body_is_refused_in_anthropics_shape(stack: Stack, body: dict[str, Any], message: str) -> None:
    response = post(stack, **body)
    assert response.status_code == 400
    answer = response.json()
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"]


THREADS: list[dict[str, Any]] = [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("thread", THREADS)
def test_a_thread_is_refused_as_the_sdk_expects(stack: Stack, path: str, thread: Any) -> None:
    """Its `tool_runner` sends the whole conversation after this error."""
    answer = post(stack, path, thread=thread)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "send the whole `messages` in each request" in error["message"]
    assert not stack.scheduler.received
    for empty in (None, False):
        assert post(stack, path, thread=empty).status_code == 200


def test_fields_without_effect_are_accepted(stack: Stack) -> None:
    say(stack, "Hello!")
    body = {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    assert post(stack, **body).status_code == 200


def test_both_headers_hold_the_key(stack: Stack) -> None:
    say(stack, "Hello!")
    body = {"model": "m", "max_tokens": 5, "messages": ASK}
    for headers, status in (
        ({"x-api-key": "k"}, 200),
        ({"Authorization": "Bearer k"}, 200),
        ({"x-api-key": "k", "Authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        assert stack.post("/v1/messages", body, headers=headers).status_code == status
