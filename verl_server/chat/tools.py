"""Tools of a chat request: decodes OpenAI's shapes, and converts tools and tool calls for the chat template.

Dialects with another shape convert it into OpenAI's shape first. `tool_grammar.output_grammar` makes the grammar that
permits nothing but calls, and `output` parses the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from verl_server.chat.call_readers import TEXT, ParameterTypes
from verl_server.errors import BadRequestError

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (str, "string"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (type(None), "null"),
    (list, "array"),
    (dict, "object"),
)
_ALL_TYPES = frozenset(name for _, name in _TYPE_NAMES)
_STRING = frozenset({"string"})
_MOST_SCHEMAS = 64
"""The most schemas that are read for the types of one parameter."""
_NAME_RULE = "must be a string of 1 to 128 letters, digits and characters of `_.:/-`"


class Tool(msgspec.Struct, kw_only=True, frozen=True):
    """A function that the policy may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. None: any object."""
    strict: bool = False
    """The caller's setting that a forced call must follow the schema. A forced call always follows the schema."""
    definition: dict[str, Any] = {}
    """The tool in OpenAI's shape, as the caller wrote it. The chat template gets this object."""


class ToolChoice(msgspec.Struct, frozen=True):
    """The tools that the policy may or must call."""

    mode: Literal["auto", "none", "required"]
    name: str | None = None
    """The only tool that may be called, with `required`."""

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"


def read_tools(value: Any, places: Sequence[str] = ()) -> list[Tool]:
    """Decode OpenAI's `tools`. Raise BadRequestError, which names the place, for anything else.

    `places` are the tools' places in a body of another shape. Default: `tools[0]`, `tools[1]`, ...
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequestError(f"tools must be a list of tools, not {_kind(value)}.")
    places = places or [f"tools[{i}]" for i in range(len(value))]
    tools = [_read_tool(place, each) for place, each in zip(places, value, strict=True)]
    seen: set[str] = set()
    for place, tool in zip(places, tools, strict=True):
        if tool.name in seen:
            raise BadRequestError(f"{place} has the name `{tool.name}` of another tool: names must differ.")
        seen.add(tool.name)
    return tools


def _read_tool(place: str, value: Any) -> Tool:
    if not isinstance(value, dict):
        raise BadRequestError(f"{place} must be an object, not {_kind(value)}.")
    kind = value.get("type")
    if kind not in (None, "function"):
        raise BadRequestError(f'{place}.type {kind!r:.64} is not supported: the only type is "function".')
    function = value.get("function")
    if not isinstance(function, dict):
        raise BadRequestError(f"{place}.function must be an object with `name`, not {_kind(function)}.")
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequestError(f"{place}.function.name {_NAME_RULE}, not {name!r:.64}.")
    if not isinstance(function.get("description", ""), str | None):
        raise BadRequestError(f"{place}.function.description must be a string.")
    if not isinstance(strict, bool | None):
        raise BadRequestError(f"{place}.function.strict must be true or false, not {strict!r:.64}.")
    if parameters is not None:
        _check_schema(f"{place}.function.parameters", parameters)
    definition = value | {"type": "function", "function": _without_marks(function)}
    return Tool(name=name, parameters=parameters, strict=bool(strict), definition=_without_marks(definition))


def _without_marks(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without `cache_control`, which marks a place of the prompt for a cache of another service."""
    return {key: each for key, each in value.items() if key != "cache_control"}


def _check_schema(place: str, schema: Any) -> None:
    if not isinstance(schema, dict):
        raise BadRequestError(f"{place} must be a JSON schema (an object), not {_kind(schema)}.")
    kinds = schema.get("type")
    if kinds not in (None, "object") and not (isinstance(kinds, list) and "object" in kinds):
        raise BadRequestError(f'{place}.type must be "object", not {kinds!r:.64}.')
    if not isinstance(schema.get("properties"), dict | None):
        raise BadRequestError(f"{place}.properties must be an object, not {_kind(schema['properties'])}.")


def read_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Decode OpenAI's `tool_choice`. The default is auto, or none without tools.

    Raise BadRequestError, which says what is wrong.
    """
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value in ("auto", "none"):
        return ToolChoice(value if tools else "none")
    if value == "required":
        choice = ToolChoice("required")
    elif isinstance(value, dict) and value.get("type") == "function":
        choice = ToolChoice("required", _chosen_name(value))
    elif isinstance(value, dict) and value.get("type") == "allowed_tools":
        raise BadRequestError("tool_choice of type allowed_tools is not supported: send only these tools in `tools`.")
    else:
        raise BadRequestError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}, '
            f"not {value!r:.64}."
        )
    if not tools:
        raise BadRequestError("tool_choice requires a tool call, but the request has no `tools`.")
    names = [tool.name for tool in tools]
    if choice.name is not None and choice.name not in names:
        shown = ", ".join(f"`{name}`" for name in names[:16])
        raise BadRequestError(f"tool_choice names the tool `{choice.name:.64}`, which is not in `tools` ({shown}).")
    return choice


def _chosen_name(value: dict[str, Any]) -> str:
    """Return the name in {"type": "function", "function": {"name"}}, or in {"type": "function", "name"}."""
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequestError("tool_choice.function.name must be the name of a tool.")
    return name


def parameter_types(tools: Sequence[Tool]) -> ParameterTypes:
    """Return the JSON types that the schema of each parameter allows, for `OutputFormat.parser`."""
    types: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        schema = tool.parameters or {}
        properties = schema.get("properties") or {}
        types[tool.name] = {
            name: TEXT if _is_text(value) else _types(value, schema, [_MOST_SCHEMAS])
            for name, value in properties.items()
        }
    return types


def _is_text(schema: Any) -> bool:
    """Return True for a plain string. A string by reference or in a union may be an enumeration, which a forced call
    writes as JSON."""
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    if schema.get("nullable") is True:
        return False
    if kind is None:
        values = schema.get("enum") or [schema.get("const", "")]
        has_parts = any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "properties", "items"))
        return not has_parts and isinstance(values, list) and all(isinstance(value, str) for value in values)
    return bool(kind in ("string", ["string"]))


def _types(schema: Any, root: dict[str, Any], left: list[int]) -> frozenset[str]:
    """Return the types that a schema allows: "string" if it names no type, every type if its types are unknown.

    `left` is [number of schemas that may still be read], because references may form a circle.
    """
    left[0] -= 1
    if left[0] < 0:
        return _ALL_TYPES
    if not isinstance(schema, dict):
        return _STRING
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        named = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
        named |= {"integer"} if "number" in named else set()
        return frozenset(named | ({"null"} if schema.get("nullable") is True else set()))  # OpenAPI 3.0's
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(map(_type_of, values)) or _STRING
    if "$ref" in schema:
        return _types(_referred(schema["$ref"], root), root, left)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            return frozenset().union(*(_types(part, root, left) for part in parts)) or _ALL_TYPES
    if isinstance(parts := schema.get("allOf"), list):
        return _ALL_TYPES.intersection(*(_types(part, root, left) for part in parts))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else _STRING


def _referred(reference: Any, root: dict[str, Any]) -> Any:
    """Return the schema that a reference such as #/$defs/name refers to."""
    found: Any = root
    for part in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {"type": sorted(_ALL_TYPES)}


def _type_of(value: Any) -> str:
    return next(name for kind, name in _TYPE_NAMES if isinstance(value, kind))


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the variable `tools` of a chat template."""
    return [tool.definition for tool in tools]


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the results of parallel calls in the order of the calls.

    Clients may send results in the order in which the tools ended. Most templates write no ids, so the policy knows by
    the position alone which call a result answers. Results that answer no known call, or one call twice, stay as they
    are.
    """
    ordered = list(messages)
    for i, message in enumerate(ordered):
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            continue
        ids = [call.get("id") for call in calls if isinstance(call, dict)]
        end = next((j for j in range(i + 1, len(ordered)) if ordered[j].get("role") != "tool"), len(ordered))
        answered = [result.get("tool_call_id") for result in ordered[i + 1 : end]]
        if len({*map(str, ids)}) == len(ids) and len({*map(str, answered)}) == len(answered) and {*answered} <= {*ids}:
            ordered[i + 1 : end] = sorted(ordered[i + 1 : end], key=lambda result: ids.index(result["tool_call_id"]))
    return ordered


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's messages in the form that chat templates expect.

    The arguments of a tool call are an object: templates write them as JSON, and a string would be quoted once more.
    Arguments that are not a JSON object stay a string. A message of the role "tool" gets the `name` of the function
    whose call it answers. Raise BadRequestError for a wrong `tool_calls`.
    """
    names: dict[str, str] = {}
    ready = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls is not None:
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            if not isinstance(calls, list):
                raise BadRequestError(f"messages[{i}].tool_calls must be a list, not {_kind(calls)}.")
            read = [_template_call(f"messages[{i}].tool_calls[{j}]", call) for j, call in enumerate(calls)]
            names |= {call["id"]: call["function"]["name"] for call in read if isinstance(call.get("id"), str)}
            if read:
                message["tool_calls"] = read
        call_id = message.get("tool_call_id")
        if message.get("role") == "tool" and message.get("name") is None and isinstance(call_id, str):
            message = message | ({"name": names[call_id]} if call_id in names else {})
        ready.append(message)
    return ready


def _template_call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"{place} must be an object with `function`, which has `name` and `arguments`.")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise BadRequestError(f"{place}.function.arguments must be JSON text or an object, not {_kind(arguments)}.")
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    read: dict[str, Any] = {"type": "function"} | call | {"function": function | {"arguments": arguments}}
    return read


def _object_or_text(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
