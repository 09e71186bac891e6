"""Tools are decoded strictly, and templates get them and their calls in the form that templates expect."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.chat.call_readers import TEXT
from verl_server.chat.tools import (
    ToolChoice,
    in_call_order,
    parameter_types,
    read_tool_choice,
    read_tools,
    template_messages,
    template_tools,
)
from verl_server.errors import BadRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET: dict[str, Any] = {"type": "function", "function": {"name": "get", "description": "Weather.", "parameters": SCHEMA}}
PUT: dict[str, Any] = {"type": "function", "function": {"name": "put", "strict": True}}


def with_function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "get", **fields}}]


def test_tools_are_decoded_and_given_to_the_template_as_they_are() -> None:
    get, put = read_tools([GET, PUT])
    assert (get.name, get.parameters, get.strict, put.name, put.parameters, put.strict) == (
        "get", SCHEMA, False, "put", None, True,
    )  # fmt: skip
    assert template_tools([get, put]) == [GET, PUT]
    assert read_tools(None) == read_tools([]) == []


def test_a_mark_for_a_cache_is_no_part_of_a_tool() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    assert read_tools([GET | mark, PUT | {"function": PUT["function"] | mark}]) == read_tools([GET, PUT])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools must be a list"),
        ([5], r"tools\[0\] must be an object, not int"),
        ([{"type": "web_search"}], r"tools\[0\].type 'web_search' is not supported"),
        ([GET, {"type": "function"}], r"tools\[1\].function must be an object"),
        (with_function(name=""), r"tools\[0\].function.name must be a string of 1 to 128"),
        (with_function(name="a b"), "not 'a b'"),
        (with_function(description=5), "description must be a string"),
        (with_function(strict="yes"), "strict must be true or false"),
        (with_function(parameters=[]), "parameters must be a JSON schema"),
        (with_function(parameters={"type": "array"}), 'parameters.type must be "object"'),
        (with_function(parameters={"properties": []}), "parameters.properties must be an object, not list"),
        ([GET, GET], r"tools\[1\] has the name `get` of another tool"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_tools(tools)


def test_choices() -> None:
    tools = read_tools([GET, PUT])
    assert read_tool_choice(None, tools) == read_tool_choice("auto", tools) == ToolChoice("auto")
    assert read_tool_choice(None, []) == read_tool_choice("auto", []) == read_tool_choice("none", tools)
    assert read_tool_choice("required", tools) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "put"}}
    assert read_tool_choice(named, tools) == ToolChoice("required", "put")
    assert read_tool_choice({"type": "function", "name": "put"}, tools) == ToolChoice("required", "put")


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("any", [GET], "tool_choice must be"),
        (5, [GET], "not 5"),
        ({"type": "function"}, [GET], "tool_choice.function.name"),
        (
            {"type": "function", "function": {"name": "cut"}},
            [GET, PUT],
            r"`cut`, which is not in `tools` \(`get`, `put",
        ),
        ({"type": "allowed_tools"}, [GET], "send only these tools"),
        ("required", [], "the request has no `tools`"),
    ],
)
def test_wrong_choices_are_refused(choice: Any, tools: list[Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_tool_choice(choice, read_tools(tools))


def test_types_of_parameters() -> None:
    schema: dict[str, Any] = {
        "properties": {
            "text": {"type": "string"}, "list_of_one": {"type": ["string"]}, "words": {"enum": ["x"]},
            "nothing": {}, "any": True, "fixed": {"const": "x"},
            "whole": {"type": "integer"}, "number": {"type": "number"}, "ids": {"enum": [1, None]},
            "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "two": {"type": ["string", "integer"]}, "root": {"$ref": "#"}, "named": {"$ref": "#/$defs/Place"},
            "lost": {"$ref": "#/$defs/Lost"}, "round": {"$ref": "#/$defs/Round"}, "items": {"items": {}},
            "nullable": {"type": "string", "nullable": True},
            "chosen": {"$ref": "#/$defs/Choice"}, "either": {"anyOf": [{"type": "string"}, {"enum": ["x"]}]},
            "both": {"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]},
        },
        "$defs": {
            "Choice": {"type": "string", "enum": ["x", "y"]},
            "Place": {"oneOf": [{"type": "object"}, {"type": "boolean"}]},
            "Round": {"anyOf": [{"$ref": "#/$defs/Round"}, {"$ref": "#/$defs/Round"}]},
        },
    }  # fmt: skip
    (types,) = parameter_types(read_tools(with_function(parameters=schema))).values()
    every = {"string", "number", "integer", "boolean", "null", "array", "object"}
    expected: dict[str, set[str]] = {
        **{key: set(TEXT) for key in ("text", "list_of_one", "words", "nothing", "any", "fixed")},
        **{"whole": {"integer"}, "number": {"number", "integer"}, "ids": {"integer", "null"}},
        **{"optional": {"string", "null"}, "two": {"string", "integer"}, "root": {"object"}},
        **{"named": {"object", "boolean"}, "lost": every, "round": every, "items": {"array"}, "both": {"null"}},
        **{"nullable": {"string", "null"}, "chosen": {"string"}, "either": {"string"}},
    }
    assert types == expected


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ("", {}),
        (None, {}),
        ('{"city": ', '{"city": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_an_object_if_they_are_one(arguments: Any, expected: Any) -> None:
    (message,) = template_messages([{"role": "assistant", "content": "", "tool_calls": [call(arguments)]}])
    assert message["tool_calls"] == [call(expected)]


def test_a_result_has_the_name_of_its_function() -> None:
    talk = [
        {"role": "assistant", "content": "", "tool_calls": [call("{}")]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "content": "sun"},
        {"role": "tool", "tool_call_id": "1", "name": "own", "content": "sun"},
        {"role": "assistant", "content": "Hi", "tool_calls": []},
    ]
    names = [message.get("name") for message in template_messages(talk)]
    assert names == [None, "get", None, "own", None] and "tool_calls" not in template_messages(talk)[-1]


@pytest.mark.parametrize("calls", [{}, [5], [{"function": {}}], [call(5)], [{"name": "get"}]])
def test_wrong_calls_are_refused(calls: Any) -> None:
    with pytest.raises(BadRequestError, match=r"messages\[0\].tool_calls"):
        template_messages([{"role": "assistant", "tool_calls": calls}])


def _results(ids: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": each, "content": each} for each in ids]


@pytest.mark.parametrize(
    ("calls", "given", "expected"),
    [
        ("abc", "cab", "abc"),
        ("abc", "ca", "ac"),
        ("abc", "cax", "cax"),
        ("abc", "caa", "caa"),
        ("aab", "ba", "ba"),
        ("a", "ba", "ba"),
    ],
)
def test_results_get_the_order_of_their_calls(calls: str, given: str, expected: str) -> None:
    asking = {"role": "assistant", "tool_calls": [{"id": each, "function": {"name": "f"}} for each in calls]}
    user = {"role": "user", "content": "?"}
    messages = [user, asking, *_results(given), user, *_results("ba")]
    assert in_call_order(messages) == [user, asking, *_results(expected), user, *_results("ba")]
    assert messages[2:4] == _results(given)[:2], "the given list stays as it is"
