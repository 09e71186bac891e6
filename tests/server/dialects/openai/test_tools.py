"""Tools, reasoning and formats of the output in chats, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.dialects.openai.conftest import MESSAGES, Caller
from verl_server.models.tiny import CHAT_TEMPLATE
from verl_server.server.dialects.openai.messages import _unused

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def thinking(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A server whose template shows the reasoning of earlier messages, so that its format is known."""
    template = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    think = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}"
    mode = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    template.write_text(CHAT_TEMPLATE.replace("{{ message['content'] }}", think + "{{ message['content'] }}") + mode)
    stack = Stack(text_folder, chat_template=str(template))
    yield Caller(stack)
    stack.close()


def joined(frames: list[Any]) -> dict[str, Any]:
    """Return the message that the chunks of a stream add up to, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for frame in frames:
        for choice in frame["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    message["calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                message["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def test_calls_are_parsed(call: Caller) -> None:
    call.says(f"Let me see.\n{CALL}\n{CALL}")
    (choice,) = call.chat(tools=[TOOL])["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see." and choice["finish_reason"] == "tool_calls"
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({c["id"] for c in message["tool_calls"]}) == 2 and message["tool_calls"][0]["type"] == "function"
    assert '"name": "add"' in call.text.decoder(False)(call.sent().input_ids)
    (choice,) = call.chat(tools=[TOOL], parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_calls_are_streamed(call: Caller, chunk: int | None) -> None:
    call.says(f"Let me see.\n{CALL}", chunk)
    message = joined(call.stream(CHAT, messages=MESSAGES, tools=[TOOL]))
    (made,) = message["calls"]
    assert (message["content"], message["finish_reason"]) == ("Let me see.", "tool_calls")
    assert (made["name"], json.loads(made["arguments"])) == ("add", {"a": 1}) and made["id"]


def test_choice_none_shows_the_tools_and_parses_nothing(call: Caller) -> None:
    call.says(CALL)
    (choice,) = call.chat(tools=[TOOL], tool_choice="none")["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert '"name": "add"' in call.text.decoder(False)(call.sent().input_ids)
    assert "tool_calls" not in call.chat()["choices"][0]["message"]


def test_a_cut_call_is_no_call_that_ended(call: Caller) -> None:
    call.cuts(CALL[:-20])
    (choice,) = call.chat(tools=[TOOL])["choices"]
    assert choice["finish_reason"] == "length" and "add" in choice["message"]["content"]


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize(
    ("cut", "arguments"), [(CALL[:20], ""), (CALL[:-15], '{"a": 1'), (CALL[:-14], '{"a": 1}'), (CALL[:-3], '{"a": 1}')]
)
def test_a_forced_call_that_is_cut_is_a_call(call: Caller, cut: str, arguments: str, chunk: int | None) -> None:
    call.cuts(cut, chunk)
    body: Any = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    (choice,) = call.chat(**body)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": arguments}
    streamed = joined(call.stream(CHAT, **body))
    assert (streamed["finish_reason"], streamed["content"]) == ("length", "")
    assert [(each["name"], each["arguments"]) for each in streamed["calls"]] == [("add", arguments)]
    function = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    asked = {"input": "hi", "tools": [function], "tool_choice": {"type": "function", "name": "add"}}
    response = call.post("/v1/responses", **asked)
    last = json.loads(call.stack.post("/v1/responses", asked | {"stream": True}).text.split("data: ")[-1])["response"]
    for each in (response, last):
        assert (each["status"], each["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        (item,) = each["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "add", arguments)
        assert item["status"] == "incomplete"


def test_a_stop_string_inside_a_forced_call_leaves_no_whole_call(call: Caller) -> None:
    call.says(CALL)
    for body in ({}, {"stream": True}):
        given: Any = {"tools": [TOOL], "tool_choice": "required", "stop": ['"a"'], **body}
        if body:
            message = joined(call.stream(CHAT, messages=MESSAGES, **given))
            made = message["calls"][0]["arguments"], message["finish_reason"]
        else:
            (choice,) = call.chat(**given)["choices"]
            made = choice["message"]["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]
        assert made == ("{", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_are_constrained(call: Caller, choice: Any) -> None:
    call.says(CALL)
    (answer,) = call.chat(tools=[TOOL], tool_choice=choice)["choices"]
    assert answer["finish_reason"] == "tool_calls" and "add" in call.sent().grammar
    refusal = call.refusal(CHAT, messages=MESSAGES, tools=[TOOL], tool_choice=choice, regex="a+")
    assert "in another way (regex)" in refusal["message"]


def test_earlier_calls_are_rendered(call: Caller) -> None:
    made = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "x", "content": "2"}
    call.chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [made]}, result])
    assert "<|im_start|>tool\n2<|im_end|>" in call.text.decoder(False)(call.sent().input_ids)


def test_tokenize_renders_like_a_chat(call: Caller) -> None:
    call.chat(tools=[TOOL])
    assert call.post("/tokenize", messages=MESSAGES, tools=[TOOL])["tokens"] == call.sent().input_ids
    call.chat(messages=[{"role": "developer", "content": "x"}])
    assert call.text.decoder(False)(call.sent().input_ids).startswith("<|im_start|>system\nx")


def test_reasoning_is_separated(thinking: Caller) -> None:
    thinking.says("<think>\nhm\n</think>\n\nFive.")
    message = thinking.chat()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Five.", "hm", "hm")
    hidden = thinking.chat(include_reasoning=False)["choices"][0]["message"]
    assert (hidden["content"], hidden["reasoning"]) == ("Five.", None)
    whole = thinking.chat(separate_reasoning=False)["choices"][0]["message"]
    assert whole["content"] == "<think>\nhm\n</think>\n\nFive."


def test_reasoning_is_streamed(thinking: Caller) -> None:
    thinking.says("<think>\nhm hm\n</think>\n\nFive.", chunk=1)
    frames = thinking.stream(CHAT, messages=MESSAGES)
    message = joined(frames)
    assert (message["reasoning_content"], message["content"]) == ("hm hm", "Five.")
    frames = thinking.stream(CHAT, messages=MESSAGES, stream_reasoning=False)
    pieces = [frame["choices"][0]["delta"].get("reasoning_content") for frame in frames]
    assert [piece for piece in pieces if piece] == ["hm hm"]


def test_every_delta_has_the_field_of_the_reasoning(thinking: Caller) -> None:
    """SGLang's clients read the field of every delta. Deltas are of reasoning, of text, of calls, and empty."""
    for text, options in (
        ("<think>\nhm\n</think>\n\nFive.", {}),
        ("Five.", {"separate_reasoning": False}),
        (CALL, {"tools": [TOOL]}),
        ("", {"logprobs": True}),
    ):
        thinking.says(text, chunk=1)
        frames = thinking.stream(CHAT, messages=MESSAGES, **options)
        deltas = [choice["delta"] for frame in frames for choice in frame["choices"]]
        assert deltas and all("reasoning_content" in delta for delta in deltas), deltas


def test_effort_none_switches_thinking_off(thinking: Caller) -> None:
    thinking.says("x")
    thinking.chat(reasoning_effort="none")
    assert thinking.text.decoder(False)(thinking.sent().input_ids).endswith("<think>\n\n</think>\n\n")
    thinking.chat(reasoning_effort="high")
    assert not thinking.text.decoder(False)(thinking.sent().input_ids).endswith("</think>\n\n")


def test_a_schema_leaves_the_reasoning_free(thinking: Caller) -> None:
    thinking.says('<think>\nhm\n</think>\n\n{"a": 1}')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    message = thinking.chat(response_format=form)["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1} and message["reasoning"] == "hm"
    assert "think" in thinking.sent().grammar


ANSWER = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": ANSWER}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": json.dumps(ANSWER)},
    {"json_schema": ANSWER},
    {"json_schema": "true"},
    {"json_schema": True},
    {"guided_json": True},
    {"structured_outputs": {"json": True}},
]


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_schema_beside_tools_leaves_the_choice(
    thinking: Caller, chunk: int | None, thought: str, parallel: bool
) -> None:
    body = {"tools": [TOOL], "parallel_tool_calls": parallel, **SCHEMAS[0]}
    inside = json.dumps({"sum": 1, "text": CALL.replace('"', "'")})
    for text, calls in (('{"sum": 5}', 0), (inside, 0), (CALL, 1), (f"{CALL}\n{CALL}", 2 if parallel else 1)):
        thinking.says(thought + text, chunk)
        (choice,) = thinking.chat(**body)["choices"]
        message = choice["message"]
        grammar = thinking.sent().grammar
        assert "<tool_call>" in grammar and '\\"sum\\"' in grammar and "</think>" in grammar
        assert len(message.get("tool_calls") or []) == calls and message["content"] == (None if calls else text)
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        streamed = joined(thinking.stream(CHAT, messages=MESSAGES, **body))
        assert len(streamed["calls"]) == calls and streamed["content"] == ("" if calls else text)
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert (streamed["reasoning_content"] or None) == message["reasoning"] == ("hm" if thought else None)
    if thought:
        thinking.says(thought + CALL, chunk)
        (choice,) = thinking.chat(**body, separate_reasoning=False)["choices"]
        assert choice["message"]["tool_calls"] and choice["message"]["content"] == thought.rstrip()


@pytest.mark.parametrize("fields", SCHEMAS)
def test_every_name_of_a_schema_may_stand_beside_tools(call: Caller, fields: dict[str, Any]) -> None:
    call.says('{"sum": 5}')
    for choice, offered in (("auto", True), (None, True), ("none", False)):
        answer = call.chat(tools=[TOOL], tool_choice=choice, **fields)
        assert answer["choices"][0]["message"]["content"] == '{"sum": 5}'
        assert ("<tool_call>" in call.sent().grammar) == offered
    call.says(CALL)
    for forced in ("required", {"type": "function", "function": {"name": "add"}}):
        (choice,) = call.chat(tools=[TOOL], tool_choice=forced, **fields)["choices"]
        assert choice["message"]["tool_calls"] and "sum" not in call.sent().grammar
        beside = call.sent().grammar
        call.chat(tools=[TOOL], tool_choice=forced)
        assert call.sent().grammar == beside


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json_schema": "false"}, "(json_schema)"),
        ({"json_schema": False}, "(json_schema)"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[]"}, "an object or a boolean"),
    ],
)
def test_other_constraints_beside_tools(call: Caller, fields: dict[str, Any], says: str) -> None:
    assert says in call.refusal(CHAT, messages=MESSAGES, tools=[TOOL], **fields)["message"]
    if says.startswith("("):
        assert 'tool_choice to "none"' in call.refusal(CHAT, messages=MESSAGES, tools=[TOOL], **fields)["message"]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "structural_tag"),
        ({"regex": "(?s:.*)"}, "(?s:.*)"),
        ({"structured_outputs": {"regex": "(?s:.*)"}}, "(?s:.*)"),
        ({"ebnf": "start: /(?s:.*)/"}, "(?s:.*)"),
    ],
)
def test_a_constraint_of_text_beside_tools_may_describe_calls(call: Caller, fields: dict[str, Any], part: str) -> None:
    call.says(CALL)
    (choice,) = call.chat(tools=[TOOL], **fields)["choices"]
    assert choice["message"]["tool_calls"] and part in call.sent().grammar


def test_a_schema_that_cannot_be_enforced_names_its_tool(call: Caller) -> None:
    def tools(**schema: Any) -> list[Any]:
        return [{"type": "function", "function": {"name": "add", "parameters": schema}}]

    wrong, harmless = tools(properties={"a": {"uniqueItems": True}}), tools(propertyNames={"type": "string"})
    call.says(CALL)
    assert call.chat(tools=wrong)["choices"]  # nothing is compiled
    for fields in ({"tool_choice": "required"}, SCHEMAS[0]):
        message = call.refusal(CHAT, messages=MESSAGES, tools=wrong, **fields)["message"]
        assert message.startswith("tools[0] `add`: ") and "`uniqueItems`" in message
        assert call.chat(tools=harmless, **fields)["choices"]
    form = {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "null"}}}}
    message = call.refusal(CHAT, messages=MESSAGES, tools=[TOOL], response_format=form)["message"]
    assert message.startswith("the answer's schema: ") and "`not`" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["yes", 'no "x"']}},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'root ::= "a"'},
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"json_schema": '{"type": "object"}'},
    ],
)
def test_constraints(call: Caller, fields: dict[str, Any]) -> None:
    for answer in (call.complete, call.chat):
        answer(**fields)
        assert call.sent().grammar


SAME: list[dict[str, Any]] = [
    {"structured_outputs": {"json": ANSWER}, "guided_json": json.dumps(ANSWER, indent=1)},
    {"structured_outputs": {"regex": "a+"}, "guided_regex": "a+", "regex": "a+"},
    {"structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"]},
    {"structured_outputs": {"grammar": 'root ::= "a"'}, "guided_grammar": 'root ::= "a"', "ebnf": 'root ::= "a"'},
    {"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}},
]
OTHER: dict[str, Any] = {
    "guided_json": {"type": "null"}, "guided_regex": "b", "guided_choice": ["c"], "guided_grammar": 'root ::= "c"',
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
}  # fmt: skip


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_the_new_field_of_vllm_beside_the_older_ones(call: Caller, fields: dict[str, Any]) -> None:
    for path, answer in (("/v1/completions", call.complete), (CHAT, call.chat)):
        answer(**fields)
        assert call.sent().grammar
        older = next(name for name in fields if name in OTHER)
        for name in (older, "guided_regex" if older != "guided_regex" else "guided_json"):
            different = {**fields, name: OTHER[name]}
            message = call.refusal(path, **different, prompt="a", messages=MESSAGES)["message"]
            assert "`structured_outputs`" in message and f"`{name}`" in message and "differently" in message


def test_text_is_no_constraint(call: Caller) -> None:
    call.chat(response_format={"type": "text"}, regex="", ebnf="")
    assert call.sent().grammar == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "a", "ebnf": "b"}, "`regex` and `ebnf`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"nonsense": 1}}, "`nonsense`"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template": "{{ messages }}"}, "allowed_chat_templates"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "sub"),
        ({"tools": [TOOL | {"type": "web_search"}]}, "tools[0].type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"verbosity": "least"}, "verbosity"),
    ],
)
def test_refused_chats(call: Caller, fields: dict[str, Any], says: str) -> None:
    assert says in call.refusal(CHAT, messages=MESSAGES, **fields)["message"]


@pytest.mark.parametrize(
    ("unread", "options", "warned"),
    [
        (["enable_thinking", "thinking"], {"reasoning_effort": "low"}, []),
        (["reasoning_effort", "thinking", "other"], {"reasoning_effort": "low"}, ["other"]),
        (["reasoning_effort", "enable_thinking", "thinking"], {"reasoning_effort": "low"}, ["reasoning_effort"]),
        (["thinking"], {"thinking": True}, ["thinking"]),
    ],
)
def test_an_effort_is_unused_only_if_no_variable_of_it_is_read(
    unread: list[str], options: dict[str, Any], warned: list[str]
) -> None:
    assert _unused(unread, options) == warned
