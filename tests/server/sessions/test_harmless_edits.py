"""Edits of a history: the harmless ones continue the conversation, and the others begin a branch of a known kind.

Each dialect plays a call, its result and an answer. A third request then sends the history back with one edit, as an
agent program does from one request to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.chat.session_fakes import TEMPLATES
from tests.server.conftest import Stack
from tests.server.fake_scheduler import INFO
from tests.server.sessions.test_conversations import Session
from verl_server.models.tiny import byte_level_tokenizer, make_model_folder

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"x": 2, "y": [1, 2]}}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}}
LONG = "the result " * 6
Edit = Callable[[dict[str, Any]], None]
"""A change of a request's body."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tokenizer = byte_level_tokenizer([], chat_template=TEMPLATES["qwen"])
    folder = make_model_folder(tmp_path_factory.mktemp("edits"), "qwen3", tokenizer=tokenizer, weights=False)
    small = {name: INFO[name] for name in ("context_length", "max_req_input_len")}
    INFO.update(context_length=8000, max_req_input_len=7999)
    one = Stack(folder, api_key="owner")
    yield one
    one.close()
    INFO.update(small)


def began(stack: Stack, path: str, edit: Edit, said: tuple[str, ...]) -> tuple[str | None, int]:
    """Play the conversation with the edit. Return (`began` of the last turn, number of branches)."""
    session = Session(stack)
    session.says(*said)
    body = _PLAYS[path](session)
    edit(body)
    session.post(path, **body)
    branches = session.trajectory()["branches"]
    tree = stack.get(f"/sessions/{session.id}", headers={"Authorization": "Bearer owner"}).json()["tree"]
    last = [each for branch in branches for each in branch["turns"] if each["turn"] == len(tree) - 1]
    return last[-1]["began"], len(branches)


# -- the conversation in each dialect -----------------------------------------------------------------------------


def _messages(session: Session) -> dict[str, Any]:
    """Return the third request of the conversation, for Anthropic's API."""
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "Be exact."}],
        "tools": [{"name": "add", "description": "Add", "input_schema": SCHEMA}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Add them."}]}],
    }
    called = session.post("/v1/messages", **body).json()["content"]
    (use,) = [block for block in called if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": LONG}]}
    body["messages"] += [{"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
    answer = session.post("/v1/messages", **body).json()["content"]
    asked = {"role": "user", "content": [{"type": "text", "text": "And then?"}]}
    body["messages"] += [{"role": "assistant", "content": answer}, asked]
    return copy.deepcopy(body)


def _chat(session: Session) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": 200,
        "tools": [{"type": "function", "function": {"name": "add", "description": "Add", "parameters": SCHEMA}}],
        "messages": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Add them."}],
    }
    called = session.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": LONG}
    body["messages"] += [called, result]
    answer = session.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    body["messages"] += [answer, {"role": "user", "content": "And then?"}]
    return copy.deepcopy(body)


def _responses(session: Session) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_output_tokens": 200,
        "instructions": "Be exact.",
        "tools": [{"type": "function", "name": "add", "description": "Add", "parameters": SCHEMA}],
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add them."}]}],
    }
    called = session.post("/v1/responses", **body).json()["output"]
    call_id = next(item["call_id"] for item in called if item["type"] == "function_call")
    body["input"] += [*called, {"type": "function_call_output", "call_id": call_id, "output": LONG}]
    answer = session.post("/v1/responses", **body).json()["output"]
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And then?"}]}
    body["input"] += [*answer, asked]
    return copy.deepcopy(body)


_PLAYS = {"/v1/messages": _messages, "/v1/chat/completions": _chat, "/v1/responses": _responses}

# -- edits of Anthropic's bodies ------------------------------------------------------------------------------------

CACHE = {"cache_control": {"type": "ephemeral"}}


def _blocks(body: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    lists = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [block for blocks in lists for block in blocks if block["type"] == kind]


def _cache_points(body: dict[str, Any]) -> None:
    body["system"][0] |= CACHE
    body["tools"][0] |= CACHE
    body["messages"][0]["content"][0] |= CACHE
    body["messages"][-1]["content"][0] |= CACHE | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    _blocks(body, "tool_result")[0].update(CACHE)


def _strings_for_blocks(body: dict[str, Any]) -> None:
    body["system"] = "Be exact."
    body["messages"][0]["content"] = "Add them."
    body["messages"][-2]["content"] = "".join(block.get("text", "") for block in body["messages"][-2]["content"])
    body["messages"][-1]["content"] = "And then?"
    _blocks(body, "tool_result")[0]["content"] = LONG


def _other_ids(body: dict[str, Any]) -> None:
    _blocks(body, "tool_use")[0]["id"] = _blocks(body, "tool_result")[0]["tool_use_id"] = "toolu_other"


def _keys_in_another_order(body: dict[str, Any]) -> None:
    use = _blocks(body, "tool_use")[0]
    use["input"] = {"b": {"y": [1, 2.0], "x": 2}, "a": 1.0}


def _tools_with_keys_in_another_order(body: dict[str, Any]) -> None:
    properties = dict(reversed(SCHEMA["properties"].items()))  # type: ignore[attr-defined]
    body["tools"] = [
        {"input_schema": {"properties": properties, "type": "object"}, "description": "Add", "name": "add"}
    ]


def _empty_blocks_of_the_assistant(body: dict[str, Any]) -> None:
    body["messages"][1]["content"].insert(0, {"type": "text", "text": ""})
    body["messages"][-2]["content"].append({"type": "text", "text": ""})


def _reasoning_removed(body: dict[str, Any]) -> None:
    for message in body["messages"]:
        if message["role"] == "assistant":
            message["content"] = [block for block in message["content"] if block["type"] != "thinking"]


def _white_space_of_replies(body: dict[str, Any]) -> None:
    for block in body["messages"][-2]["content"]:
        if block["type"] == "text":
            block["text"] = f"\n {block['text']} \n"


def _error_is_false(body: dict[str, Any]) -> None:
    _blocks(body, "tool_result")[0]["is_error"] = False


def _other_settings(body: dict[str, Any]) -> None:
    body |= {"max_tokens": 100, "temperature": 0.5, "stop_sequences": ["STOP"], "metadata": {"user_id": "u"}}
    body["tool_choice"] = {"type": "auto"}


def _no_calls(body: dict[str, Any]) -> None:
    body["tool_choice"] = {"type": "none"}


def _thinking_on(body: dict[str, Any]) -> None:
    body["thinking"] = {"type": "adaptive"}


def _thinking_off(body: dict[str, Any]) -> None:
    body["thinking"] = {"type": "disabled"}


def _user_in_two_messages(body: dict[str, Any]) -> None:
    body["messages"].append({"role": "user", "content": "Tell me."})


def _system_in_the_middle(body: dict[str, Any]) -> None:
    body["messages"].append({"role": "system", "content": "Be quick."})


def _reminder_in_an_old_message(body: dict[str, Any]) -> None:
    body["messages"][0]["content"].append({"type": "text", "text": "<system-reminder>\nBe quick.\n</system-reminder>"})


def _reminder_in_the_last_message(body: dict[str, Any]) -> None:
    body["messages"][-1]["content"].append({"type": "text", "text": "<system-reminder>\nBe quick.\n</system-reminder>"})


def _result_cut(body: dict[str, Any]) -> None:
    _blocks(body, "tool_result")[0]["content"] = "[cleared]"


def _compacted(body: dict[str, Any]) -> None:
    body["messages"] = [{"role": "user", "content": "In short: they were added."}]


def _other_system(body: dict[str, Any]) -> None:
    body["system"] = "Be quick."


def _further_tool(body: dict[str, Any]) -> None:
    body["tools"].append(body["tools"][0] | {"name": "subtract"})


def _other_reply(body: dict[str, Any]) -> None:
    body["messages"][-2]["content"] = "Something else."


def _nothing(body: dict[str, Any]) -> None:
    pass


MESSAGES: list[tuple[Edit, str | None]] = [
    (_nothing, None),
    (_cache_points, None),
    (_strings_for_blocks, None),
    (_other_ids, None),
    (_keys_in_another_order, None),
    (_tools_with_keys_in_another_order, None),
    (_empty_blocks_of_the_assistant, None),
    (_reasoning_removed, None),
    (_white_space_of_replies, None),
    (_error_is_false, None),
    (_other_settings, None),
    (_no_calls, None),
    (_thinking_on, None),
    (_thinking_off, None),
    (_user_in_two_messages, None),
    (_system_in_the_middle, None),
    (_reminder_in_the_last_message, None),
    (_reminder_in_an_old_message, "edited"),
    (_result_cut, "edited"),
    (_other_reply, "edited"),
    (_compacted, "edited"),
    (_other_system, "head"),
    (_further_tool, "head"),
]


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
@pytest.mark.parametrize(("edit", "kind"), MESSAGES, ids=[edit.__name__[1:] for edit, _ in MESSAGES])
def test_edits_of_anthropics_messages(stack: Stack, edit: Edit, kind: str | None, thinks: bool) -> None:
    thought = THOUGHT if thinks else ""
    found, branches = began(stack, "/v1/messages", edit, (f"{thought}I add. {CALL}", f"{thought}Three.", "Done."))
    assert (found, branches) == (kind, 1 if kind is None else 2)


# -- edits of OpenAI's chats ------------------------------------------------------------------------------------


def _chat_parts(body: dict[str, Any]) -> None:
    for message in body["messages"]:
        if message.get("content"):
            message["content"] = [{"type": "text", "text": message["content"], **CACHE}]


def _chat_other_ids(body: dict[str, Any]) -> None:
    body["messages"][2]["tool_calls"][0]["id"] = body["messages"][3]["tool_call_id"] = "call_other"


def _chat_arguments(body: dict[str, Any]) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"b": {"y": [1, 2.0], "x": 2},\n "a": 1.0}'


def _chat_argument_object(body: dict[str, Any]) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": {"x": 2, "y": [1, 2]}}


def _chat_tools_reordered(body: dict[str, Any]) -> None:
    properties = dict(reversed(SCHEMA["properties"].items()))  # type: ignore[attr-defined]
    function = {"parameters": {"properties": properties, "type": "object"}, "name": "add", "description": "Add"}
    body["tools"] = [{"function": function, "type": "function"}]


def _chat_tools_cached(body: dict[str, Any]) -> None:
    body["tools"][0] |= CACHE


def _chat_tools_explicit(body: dict[str, Any]) -> None:
    del body["tools"][0]["type"]
    body["tools"][0]["function"]["strict"] = None


def _chat_absent_keys(body: dict[str, Any]) -> None:
    body["messages"][2] = {name: value for name, value in body["messages"][2].items() if value}
    body["messages"][4] = {name: value for name, value in body["messages"][4].items() if value}


def _chat_null_keys(body: dict[str, Any]) -> None:
    nulls = {"refusal": None, "audio": None, "function_call": None, "annotations": [], "name": None}
    body["messages"][2] |= nulls
    body["messages"][4] |= nulls | {"tool_calls": None}


def _chat_empty_calls(body: dict[str, Any]) -> None:
    body["messages"][4]["tool_calls"] = []


def _chat_names_of_tools(body: dict[str, Any]) -> None:
    body["messages"][3]["name"] = "add"


def _chat_developer(body: dict[str, Any]) -> None:
    body["messages"][0]["role"] = "developer"


def _chat_reasoning_removed(body: dict[str, Any]) -> None:
    for message in body["messages"]:
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)


def _chat_white_space(body: dict[str, Any]) -> None:
    for at in (2, 4):
        body["messages"][at]["content"] = f"\n{body['messages'][at]['content'] or ''} \n"


def _chat_settings(body: dict[str, Any]) -> None:
    body |= {"max_tokens": 100, "temperature": 0.5, "user": "u", "tool_choice": "auto", "parallel_tool_calls": True}


def _chat_no_calls(body: dict[str, Any]) -> None:
    body["tool_choice"] = "none"


def _chat_format(body: dict[str, Any]) -> None:
    body["response_format"] = {"type": "json_object"}


def _chat_effort(body: dict[str, Any]) -> None:
    body["reasoning_effort"] = "low"


def _chat_call_content(body: dict[str, Any]) -> None:
    body["messages"][2]["content"] = [
        {"type": "text", "text": body["messages"][2]["content"]},
        {"type": "text", "text": ""},
    ]


def _chat_result_cut(body: dict[str, Any]) -> None:
    body["messages"][3]["content"] = "[cleared]"


def _chat_reminder(body: dict[str, Any]) -> None:
    body["messages"][1]["content"] += "\n<system-reminder>Be quick.</system-reminder>"


def _chat_other_system(body: dict[str, Any]) -> None:
    body["messages"][0]["content"] = "Be quick."


def _chat_further_tool(body: dict[str, Any]) -> None:
    function = body["tools"][0]["function"] | {"name": "subtract"}
    body["tools"].append({"type": "function", "function": function})


def _chat_other_reply(body: dict[str, Any]) -> None:
    body["messages"][4]["content"] = "Something else."


CHAT: list[tuple[Edit, str | None]] = [
    (_nothing, None),
    (_chat_parts, None),
    (_chat_other_ids, None),
    (_chat_arguments, None),
    (_chat_argument_object, None),
    (_chat_tools_reordered, None),
    (_chat_tools_cached, None),
    (_chat_tools_explicit, None),
    (_chat_absent_keys, None),
    (_chat_null_keys, None),
    (_chat_empty_calls, None),
    (_chat_names_of_tools, None),
    (_chat_developer, None),
    (_chat_reasoning_removed, None),
    (_chat_white_space, None),
    (_chat_settings, None),
    (_chat_no_calls, None),
    (_chat_format, None),
    (_chat_effort, None),
    (_chat_call_content, None),
    (_chat_reminder, "edited"),
    (_chat_result_cut, "edited"),
    (_chat_other_reply, "edited"),
    (_chat_other_system, "head"),
    (_chat_further_tool, "head"),
]


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
@pytest.mark.parametrize(("edit", "kind"), CHAT, ids=[edit.__name__[1:] for edit, _ in CHAT])
def test_edits_of_chats(stack: Stack, edit: Edit, kind: str | None, thinks: bool) -> None:
    thought = THOUGHT if thinks else ""
    said = (f"{thought}I add. {CALL}", f"{thought}Three.", "Done.")
    assert began(stack, "/v1/chat/completions", edit, said) == (kind, 1 if kind is None else 2)


# -- edits of OpenAI's responses ------------------------------------------------------------------------------------


def _items(body: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [item for item in body["input"] if item.get("type") == kind]


def _items_without_ids(body: dict[str, Any]) -> None:
    body["input"] = [
        {name: value for name, value in item.items() if name not in ("id", "status")} for item in body["input"]
    ]


def _items_as_strings(body: dict[str, Any]) -> None:
    for item in _items(body, "message"):
        item["content"] = "".join(part["text"] for part in item["content"])
        del item["type"]


def _items_other_ids(body: dict[str, Any]) -> None:
    _items(body, "function_call")[0]["call_id"] = "call_other"
    _items(body, "function_call_output")[0]["call_id"] = "call_other"


def _items_arguments(body: dict[str, Any]) -> None:
    _items(body, "function_call")[0]["arguments"] = '{"b":{"y":[1,2],"x":2},"a":1}'


def _items_output_parts(body: dict[str, Any]) -> None:
    _items(body, "function_call_output")[0]["output"] = [{"type": "input_text", "text": LONG}]


def _items_without_reasoning(body: dict[str, Any]) -> None:
    body["input"] = [item for item in body["input"] if item["type"] != "reasoning"]


def _items_encrypted_reasoning(body: dict[str, Any]) -> None:
    for item in _items(body, "reasoning"):
        item.pop("content", None)
        item |= {"summary": [], "encrypted_content": "gAAA"}


def _items_white_space(body: dict[str, Any]) -> None:
    _items(body, "message")[-2]["content"][0]["text"] += " \n"


def _items_instructions_as_a_message(body: dict[str, Any]) -> None:
    body["input"].insert(0, {"type": "message", "role": "developer", "content": body.pop("instructions")})


def _items_settings(body: dict[str, Any]) -> None:
    body |= {
        "max_output_tokens": 100,
        "temperature": 0.5,
        "store": False,
        "metadata": {"a": "b"},
        "tool_choice": "auto",
    }


def _items_no_calls(body: dict[str, Any]) -> None:
    body["tool_choice"] = "none"


def _items_effort(body: dict[str, Any]) -> None:
    body["reasoning"] = {"effort": "low", "summary": "auto"}


def _items_result_cut(body: dict[str, Any]) -> None:
    _items(body, "function_call_output")[0]["output"] = "[cleared]"


def _items_reminder(body: dict[str, Any]) -> None:
    _items(body, "message")[0]["content"].append({"type": "input_text", "text": "<reminder/>"})


def _items_other_instructions(body: dict[str, Any]) -> None:
    body["instructions"] = "Be quick."


RESPONSES: list[tuple[Edit, str | None]] = [
    (_nothing, None),
    (_items_without_ids, None),
    (_items_as_strings, None),
    (_items_other_ids, None),
    (_items_arguments, None),
    (_items_output_parts, None),
    (_items_without_reasoning, None),
    (_items_encrypted_reasoning, None),
    (_items_white_space, None),
    (_items_instructions_as_a_message, None),
    (_items_settings, None),
    (_items_no_calls, None),
    (_items_effort, None),
    (_items_reminder, "edited"),
    (_items_result_cut, "edited"),
    (_items_other_instructions, "head"),
]


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
@pytest.mark.parametrize(("edit", "kind"), RESPONSES, ids=[edit.__name__[1:] for edit, _ in RESPONSES])
def test_edits_of_responses(stack: Stack, edit: Edit, kind: str | None, thinks: bool) -> None:
    thought = THOUGHT if thinks else ""
    said = (f"{thought}I add. {CALL}", f"{thought}Three.", "Done.")
    assert began(stack, "/v1/responses", edit, said) == (kind, 1 if kind is None else 2)
