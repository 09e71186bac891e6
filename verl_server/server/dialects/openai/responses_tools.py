"""Tools of `/v1/responses`: the functions that the policy is offered, and the items that calls of them become.

A chat template knows functions only. A function in a namespace is offered as NAMESPACE__NAME. A custom tool, whose
input is any text, is offered as a function with the one parameter `input`. `CallShape` says how a call of such a
function returns to the client, and `responses_input` reads these items when they come in again.

OpenAI's hosted tools run at OpenAI. Programs declare them unasked (codex: `web_search`), so they are left out with a
notice. Tools that a client runs and that have items of their own (`local_shell`, `computer`, ...) are refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from verl_server.errors import BadRequestError

_HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
    *("code_interpreter", "image_generation", "mcp", "tool_search", "programmatic_tool_calling"),
)
_OF_THE_SERVICE = ("type", "defer_loading", "allowed_callers", "async")
"""Keys of a function that tell OpenAI's service when to show the tool and who may call it. All are offered at once."""
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class CallShape(msgspec.Struct, frozen=True):
    """The item of a call, for a function that is offered under another name or in another form."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class OfferedTools(msgspec.Struct):
    """The tools of a request as functions of a chat."""

    functions: list[dict[str, Any]]
    """In the shape of `/v1/chat/completions`."""
    places: list[str]
    """The place of each function in the body, for errors."""
    shapes: dict[str, CallShape]
    """Name of an offered function -> the shape of its calls. Calls of other functions return as they are."""
    left_out: list[str]
    """Types of the hosted tools in the request."""


def offered_name(namespace: Any, name: Any) -> Any:
    """Return the name under which a function is offered. A namespace may end with the separator, as those of MCP do."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_offered(tools: list[dict[str, Any]] | None) -> OfferedTools:
    """Return the offered functions. Raise BadRequestError for a tool that cannot be offered."""
    offered = OfferedTools([], [], {}, [])
    for i, tool in enumerate(tools or ()):
        place, kind = f"tools[{i}]", tool.get("type")
        if kind == "namespace":
            _add_namespace(offered, place, tool)
        elif kind in _HOSTED:
            offered.left_out.append(str(kind))
        else:
            _add(offered, place, tool, None, "")
    return offered


def read_choice(choice: Any) -> Any:
    """Return `tool_choice` in the shape of a chat."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom") and "name" in choice:
        return {"type": "function", "name": offered_name(choice.get("namespace"), choice["name"])}
    return choice


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments that the policy wrote. Other arguments are the input."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return given if isinstance(given, str) else arguments


def custom_arguments(input: str) -> str:
    """Return the arguments whose `custom_input` is `input`."""
    return json.dumps({"input": input}, ensure_ascii=False)


def _add_namespace(offered: OfferedTools, place: str, tool: dict[str, Any]) -> None:
    namespace, inner = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise BadRequestError(f"{place}.name must be the name of the namespace.")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise BadRequestError(f"{place}.tools must be the list of the namespace's tools.")
    about = tool.get("description")
    for i, each in enumerate(inner):
        # The first function carries the description of the namespace, which a chat template has no place for.
        preface = f"{namespace}: {about}" if i == 0 and isinstance(about, str) and about else ""
        _add(offered, f"{place}.tools[{i}]", each, namespace, preface)


def _add(offered: OfferedTools, place: str, tool: dict[str, Any], namespace: str | None, preface: str) -> None:
    kind, name = tool.get("type"), tool.get("name")
    if kind == "function":
        function = {key: value for key, value in tool.items() if key not in _OF_THE_SERVICE and value is not None}
    elif kind == "custom":
        function = {"name": name, "description": _custom_description(place, tool), "parameters": _INPUT}
    else:
        raise BadRequestError(f"{place}.type {json.dumps(kind)[:64]} is not supported: declare the tool as a function.")
    if preface:
        function["description"] = "\n\n".join(filter(None, (preface, function.get("description"))))
    shown = function["name"] = offered_name(namespace, name)
    if isinstance(name, str) and (namespace or kind == "custom"):
        offered.shapes[shown] = CallShape(name, namespace, kind == "custom")
    offered.functions.append({"type": "function", "function": function})
    offered.places.append(place)


def _custom_description(place: str, tool: dict[str, Any]) -> str:
    """Return the description of a custom tool with its grammar. The grammar is told to the policy, not enforced."""
    about, form = tool.get("description") or "", tool.get("format") or {"type": "text"}
    if not isinstance(about, str) or not isinstance(form, dict):
        raise BadRequestError(f"{place} needs `description`, a text, and `format`, an object.")
    if form.get("type") == "text":
        return about
    syntax, definition = form.get("syntax"), form.get("definition")
    if form.get("type") != "grammar" or not isinstance(syntax, str) or not isinstance(definition, str):
        raise BadRequestError(
            f'{place}.format must be {{"type": "text"}} or {{"type": "grammar", "syntax", "definition"}}.'
        )
    return f"{about}\n\nThe input follows this grammar ({syntax}):\n{definition}".strip()
