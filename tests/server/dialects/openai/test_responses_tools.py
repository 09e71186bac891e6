"""Tools of `/v1/responses` besides functions: namespaces, custom tools and hosted tools, in the shapes of codex."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.dialects.openai.conftest import Caller
from tests.server.dialects.openai.test_responses import client_of
from tests.server.dialects.openai.test_tools import thinking
from tests.server.fake_scheduler import INFO
from verl_server.server.dialects.openai.responses_input import input_messages
from verl_server.server.dialects.openai.responses_tools import custom_arguments, custom_input, offered_name

__all__ = ["thinking"]

PATH = "/v1/responses"
SPAWN: Any = {
    "type": "namespace",
    "name": "team",
    "description": "Helpers.",
    "tools": [
        {
            "type": "function",
            "name": "spawn",
            "description": "Start one.",
            "strict": False,
            "defer_loading": True,
            "parameters": {"type": "object", "properties": {"message": {"type": "string"}}},
        },
        {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}},
    ],
}
SHELL: Any = {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}
SEARCH: Any = {"type": "web_search", "external_web_access": True}
TOOLS = [SHELL, SPAWN, PATCH, SEARCH]


@pytest.fixture(scope="module")
def module_stack(text_folder: Path) -> Iterator[Stack]:
    """A stack with room for the definitions of several tools."""
    saved = dict(INFO)
    INFO.update(context_length=4000, max_req_input_len=3999)
    stack = Stack(text_folder)
    yield stack
    stack.close()
    INFO.update(saved)


def tag(name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def prompt_of(call: Caller) -> str:
    return call.text.decoder(False)(call.sent().input_ids)


def test_a_namespace_is_offered_with_its_name_and_description(call: Caller) -> None:
    call.says("Hi.")
    answer = call.post(PATH, input="hi", tools=TOOLS)
    prompt = prompt_of(call)
    assert '"name": "team__spawn"' in prompt and '"name": "team__wait"' in prompt and '"name": "run"' in prompt
    assert "team: Helpers.\\n\\nStart one." in prompt and prompt.count("Helpers.") == 1
    assert "web_search" not in prompt and "defer_loading" not in prompt
    assert answer["tools"] == TOOLS


@pytest.mark.parametrize("chunk", [1, None])
def test_a_call_in_a_namespace_returns_with_both_names(call: Caller, chunk: int | None) -> None:
    call.says(f"So.\n{tag('team__spawn', {'message': 'x'})}\n{tag('run', {})}", chunk)
    with client_of(call) as client:
        *_, last = client.responses.create(model="m", input="hi", tools=TOOLS, stream=True)
    assert last.type == "response.completed"
    message, spawned, run = last.response.output
    assert message.type == "message" and spawned.type == run.type == "function_call"
    assert (spawned.namespace, spawned.name, json.loads(spawned.arguments)) == ("team", "spawn", {"message": "x"})
    assert (run.namespace, run.name) == (None, "run")


@pytest.mark.parametrize("chunk", [1, None])
def test_a_custom_tool_is_called_with_text(call: Caller, chunk: int | None) -> None:
    call.says(tag("patch", {"input": "+ é\n"}), chunk)
    with client_of(call) as client:
        events = list(client.responses.create(model="m", input="hi", tools=TOOLS, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    added: Any = events[2]
    done: Any = events[5]
    assert (added.item.type, added.item.input) == ("custom_tool_call", "")
    assert (done.item.name, done.item.input, done.item.call_id) == ("patch", "+ é\n", added.item.call_id)
    deltas = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    assert deltas == "+ é\n"
    prompt = prompt_of(call)
    assert '"name": "patch"' in prompt and "The input follows this grammar (lark):" in prompt and '"input"' in prompt


@pytest.mark.parametrize("arguments", ["{}", '{"input": 5}', '{"input": "a", "more": 1}', '{"input": "a', "[1]", "x"])
def test_other_arguments_of_a_custom_tool_are_its_input(arguments: str) -> None:
    assert custom_input(arguments) == arguments
    assert custom_input(custom_arguments(arguments)) == arguments


def test_items_of_calls_come_in_again(call: Caller) -> None:
    """The next request of a program has the calls and their outputs, with keys of the program's own."""
    call.says("Done.")
    items: Any = [
        {"type": "message", "id": "msg_0", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message", "id": "msg_2", "role": "assistant", "phase": "commentary",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {
            "type": "function_call", "id": "fc_1", "call_id": "c1", "namespace": "team", "name": "spawn",
            "arguments": '{"message": "x"}',
        },
        {
            "type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "patch", "input": "+ é\n",
            "status": "completed",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "started"},
        {"type": "custom_tool_call_output", "id": "cto_1", "call_id": "c2", "output": "patched"},
    ]  # fmt: skip
    answer = call.post(
        PATH, input=items, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True, store=False, stream=False,
        reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"], prompt_cache_key="k",
        client_metadata={"turn_id": "t"}, text={"verbosity": "low"}, service_tier="auto",
    )  # fmt: skip
    assert answer["output"][0]["content"][0]["text"] == "Done." and answer["text"]["verbosity"] == "low"
    prompt = prompt_of(call)
    reply = next(message for message in input_messages(None, items) if message["role"] == "assistant")
    assert (reply["content"], reply["reasoning_content"]) == ("So.", "hm")
    assert [(made["id"], made["function"]["name"], made["function"]["arguments"]) for made in reply["tool_calls"]] == [
        ("c1", "team__spawn", '{"message": "x"}'),
        ("c2", "patch", '{"input": "+ é\\n"}'),
    ]
    assert prompt.index("Rules") < prompt.index("So.") < prompt.index("started") < prompt.index("patched")


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_an_image_in_an_output_is_a_note_to_the_policy(call: Caller, kind: str) -> None:
    call.says("Ah.")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    output = {"type": kind, "call_id": "c", "output": [{"type": "input_text", "text": "Seen: "}, image]}
    call.post(PATH, input=[{"role": "user", "content": "hi"}, output])
    assert "Seen: [image: left out, because the model reads text only]" in prompt_of(call)
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    call.chat(messages=[{"role": "user", "content": "hi"}, tool])
    assert "[image: left out" in prompt_of(call)
    refused = call.refusal(PATH, input=[{"role": "user", "content": [image]}])
    assert "only text is served" in refused["message"]


def test_a_hosted_tool_is_left_out_with_one_notice(call: Caller, caplog: pytest.LogCaptureFixture) -> None:
    call.says("Hi.")
    kind = "code_interpreter"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            call.post(PATH, input="hi", tools=[{"type": kind, "container": {"type": "auto"}}])
    assert kind not in prompt_of(call) and "tool_call" not in prompt_of(call)
    assert len([record for record in caplog.records if kind in record.getMessage()]) == 1
    for choice in ("required", {"type": kind}):
        assert "tool_choice" in call.refusal(PATH, input="hi", tools=[{"type": kind}], tool_choice=choice)["message"]


@pytest.mark.parametrize(
    "choice", [{"type": "function", "namespace": "team", "name": "spawn"}, {"type": "function", "name": "team__spawn"}]
)
def test_a_function_of_a_namespace_may_be_forced(call: Caller, choice: dict[str, Any]) -> None:
    call.says(tag("team__spawn", {"message": "x"}))
    (item,) = call.post(PATH, input="hi", tools=TOOLS, tool_choice=choice)["output"]
    assert (item["namespace"], item["name"]) == ("team", "spawn") and "team__spawn" in call.sent().grammar


def test_a_custom_tool_may_be_forced(call: Caller) -> None:
    call.says(tag("patch", {"input": "a"}))
    (item,) = call.post(PATH, input="hi", tools=TOOLS, tool_choice={"type": "custom", "name": "patch"})["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a")


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([SEARCH, {"type": "local_shell"}], "tools[1].type"),
        ([SEARCH, SHELL, SHELL], "tools[2] has the name `run`"),
        ([SPAWN | {"name": ""}], "tools[0].name"),
        ([SPAWN | {"tools": {}}], "tools[0].tools"),
        ([SPAWN | {"tools": [SHELL, SEARCH]}], "tools[0].tools[1].type"),
        ([SPAWN | {"tools": [SHELL | {"name": "a b"}]}], "tools[0].tools[0].function.name"),
        ([SPAWN, SHELL | {"name": "team__wait"}], "tools[1] has the name `team__wait`"),
        ([PATCH | {"format": {"type": "xml"}}], "tools[0].format"),
        ([PATCH | {"name": 5}], "tools[0].function.name"),
    ],
)
def test_refused_tools(call: Caller, tools: list[Any], says: str) -> None:
    assert says in call.refusal(PATH, input="hi", tools=tools)["message"]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"type": "custom_tool_call", "name": "patch"}, "`input`, a text"),
        ({"type": "compaction", "encrypted_content": "x"}, "encrypted for another server"),
        ({"type": "local_shell_call", "action": {}}, "use messages, function_call, custom_tool_call"),
    ],
)
def test_refused_items(call: Caller, item: dict[str, Any], says: str) -> None:
    message = call.refusal(PATH, input=[{"role": "user", "content": "hi"}, item])["message"]
    assert message.startswith("input[1]") and says in message


def test_the_name_of_a_function_in_a_namespace() -> None:
    assert offered_name("team", "spawn") == offered_name("team__", "spawn") == "team__spawn"
    assert offered_name(None, "spawn") == offered_name("", "spawn") == "spawn"


def test_a_regex_may_describe_reasoning_and_calls(thinking: Caller) -> None:
    thinking.says(f"<think>\nhm\n</think>\n\nSo.\n{tag('run', {})}")
    output = thinking.post(PATH, input="hi", tools=[SHELL], regex="(?s:.*)")["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"][0]["text"] == "hm"
