"""Tools of an environment: methods that clients call by name, with arguments that are checked against their signature.

The author of an environment marks methods with `@tool`. `Toolbox` finds these methods when the environment server
starts, describes them as JSON schemas, and calls them on a `HostedEnv`. `env_mcp` serves it as JSON-RPC; `env_server`
serves it as the `step` actions that OpenEnv's tool client sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import typing
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import orjson

from verl_server.errors import BadRequestError
from verl_server.files.json_values import dumps
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.environments.action_schema import ActionSchema
from verl_server.rollout.environments.env_factory import EnvFactory
from verl_server.rollout.environments.hosted_env import EnvMessageError, HostedEnv

Method = TypeVar("Method", bound=Callable[..., Any])

RESERVED_NAMES = ("reset", "step", "state", "close")
"""Names that OpenEnv keeps for its own calls. No tool may have one of them."""
ACT = "act"
"""The tool that plays `step` in an environment that declares no tools."""

_MARK = "__verl_server_tool__"

ToolFault = Literal["tool_not_found", "invalid_args", "execution_error", "timeout"]
"""OpenEnv's kinds of failed tool calls."""


class ToolError(Exception):
    """A tool call that failed. The message says what failed and how to call the tool."""

    def __init__(self, fault: ToolFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


def tool(method: Method) -> Method:
    """Declare a method of an environment class as a tool. The method may be `async`.

    The tool has the name of the method. The first paragraph of its docstring is the tool's description. The annotations
    of its parameters are the schema of its arguments, which are converted to the annotated types before the call
    (`typing.Annotated[str, msgspec.Meta(description="...")]` describes a parameter). The method returns a value that
    can be written as JSON. Raise BadRequestError for a name that OpenEnv keeps for its own calls, and for an object
    that is no plain method.
    """
    name = getattr(method, "__name__", repr(method))
    if not inspect.isfunction(method):
        raise BadRequestError(f"@tool: {name} must be a plain method, not an object of type {type(method).__name__}.")
    if name in RESERVED_NAMES:
        raise BadRequestError(f"@tool: {name} cannot be a tool, because OpenEnv has a call of this name; rename it.")
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True)
class Tool:
    """The description of a tool that clients read."""

    name: str
    """Name of the tool."""
    description: str
    """Purpose of the tool, "" if its author wrote none."""
    input_schema: dict[str, Any]
    """JSON schema of the arguments, an object."""
    arguments: type[msgspec.Struct] | None = None
    """The struct that arguments are converted to. None for `act`, whose argument is the action."""


@dataclass(frozen=True)
class ToolResult:
    """The outcome of one call of a tool."""

    value: Any
    """The returned value; for `act`, a dict with `observation`, `reward` and `done`."""
    text: str
    """The value as text: itself if it is a string, otherwise as JSON."""
    reward: float | None = None
    """Reward of the action that `act` played. Other tools have none."""
    done: bool = False
    """True if `act` ended the episode."""

    def mcp(self) -> dict[str, Any]:
        """Return the result as MCP defines it, with `data`, the value itself, which OpenEnv's clients read."""
        structured = self.value if isinstance(self.value, dict) else {"result": self.value}
        content = [{"type": "text", "text": self.text}]
        return {"content": content, "structuredContent": structured, "isError": False, "data": self.value}


class Toolbox:
    """The tools of one environment class: the declared tools, or the tool `act` if it only has an action schema."""

    def __init__(self, name: str, factory: EnvFactory, action_schema: ActionSchema | None, timeout: float) -> None:
        """`timeout` bounds one call, in seconds. Raise BadRequestError if a tool's signature has no JSON schema."""
        self.name = name
        self.timeout = timeout
        self._action_schema = action_schema
        declared = _declared(factory)
        self.is_declared = bool(declared)
        self.tools = {entry.name: entry for entry in (_described(name, member, bound=True) for member in declared)}
        if not declared and action_schema is not None:
            self.tools = {ACT: _act(name, action_schema)}

    def takes(self, action: dict[str, Any]) -> bool:
        """Return True if an action is for the tools, as OpenEnv's tool client sends it, and not for `step`."""
        if action.get("type") not in ("list_tools", "call_tool") or not self.tools:
            return False
        return self.is_declared or (
            self._action_schema is not None and self._action_schema.violation(action) is not None
        )

    async def play(self, hosted: HostedEnv, action: dict[str, Any]) -> dict[str, Any]:
        """Answer an action that `takes` accepts with an observation. A call that fails is an observation, too."""
        if action["type"] == "list_tools":
            tools = [
                {"name": entry.name, "description": entry.description, "input_schema": entry.input_schema}
                for entry in self.tools.values()
            ]
            return {"observation": {"tools": tools}, "reward": None, "done": False}
        name, arguments = action.get("tool_name"), action.get("arguments", {})
        try:
            result = await self.call(hosted, name, arguments)
        except ToolError as error:
            failed = {"error_type": error.fault, "message": str(error)}
            return {
                "observation": {"tool_name": str(name), "result": None, "error": failed},
                "reward": None,
                "done": False,
            }
        observation = {"tool_name": name, "result": result.mcp(), "error": None}
        return {"observation": observation, "reward": result.reward, "done": result.done}

    async def call(self, hosted: HostedEnv, name: Any, arguments: Any) -> ToolResult:
        """Call a tool. An environment without an episode is reset first. Raise ToolError for every failure."""
        entry = self.tools.get(name) if isinstance(name, str) else None
        if entry is None:
            names = ", ".join(self.tools) or "none"
            raise ToolError("tool_not_found", f"{self.name} has no tool {name!r}; its tools: {names}.")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise ToolError("invalid_args", f"The arguments of {name} must be an object, not {kind}.")
        checked = converted(entry, arguments)
        async with _bounded(f"{self.name}.reset", EnvTimeouts().reset, "EnvTimeouts.reset"):
            await hosted.begin()
        async with _bounded(f"The tool {name} of {self.name}", self.timeout, "tool_timeout of the environment server"):
            if entry.arguments is None:
                step = await hosted.step(arguments)
                return ToolResult(step, value_text(name, step), step["reward"], step["done"])
            value = await hosted.invoke(name, checked)
            return ToolResult(value, value_text(name, value))


# -- declarations ----------------------------------------------------------------------------------------------


def _declared(factory: EnvFactory) -> list[Callable[..., Any]]:
    """Return the marked methods of a class, in the order of their definition, those of its base classes first."""
    owner = getattr(factory, "environment_class", factory)
    bases = reversed(owner.__mro__) if inspect.isclass(owner) else ()
    members = {name: member for base in bases for name, member in vars(base).items()}
    return [member for member in members.values() if inspect.isfunction(member) and hasattr(member, _MARK)]


def function_tool(function: Callable[..., Any]) -> Tool:
    """Describe a function, async or not, as a tool. Raise BadRequestError if its signature has no JSON schema."""
    if not inspect.isroutine(function):
        raise BadRequestError(f"A tool must be a function, not an object of type {type(function).__name__}.")
    return _described(function.__module__, function, bound=False)


def _described(owner: str, method: Callable[..., Any], *, bound: bool) -> Tool:
    """Return the description of a tool. With `bound`, the first parameter is the object, which is no argument."""
    name = method.__name__
    try:
        hints = typing.get_type_hints(method, include_extras=True)
        struct = msgspec.defstruct(name, _fields(method, hints, bound), kw_only=True, forbid_unknown_fields=True)
        _, parts = msgspec.json.schema_components([struct])
    except (NameError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise BadRequestError(
            f"The tool {owner}.{name} has no JSON schema: {reason}. Annotate its parameters with types that JSON has "
            "(str, int, float, bool, list, dict, Literal, a dataclass)."
        ) from error
    schema = parts.pop(name)
    schema.pop("title", None)
    if parts:
        schema["$defs"] = parts
    description = (inspect.getdoc(method) or "").split("\n\n")[0]
    return Tool(name, description, schema, struct)


def _fields(method: Callable[..., Any], hints: dict[str, Any], bound: bool) -> list[Any]:
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1 if bound else 0 :]:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise TypeError(f"a tool has named parameters only, not {parameter}")
        kind = hints.get(parameter.name, Any)
        has_default = parameter.default is not inspect.Parameter.empty
        fields.append((parameter.name, kind, parameter.default) if has_default else (parameter.name, kind))
    return fields


def _act(owner: str, action_schema: ActionSchema) -> Tool:
    return Tool(ACT, f"Play one action of {owner}.", {"type": "object"} | action_schema.schema)


# -- calls -----------------------------------------------------------------------------------------------------


def converted(entry: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the types of the signature. Raise ToolError if one is missing, unknown or wrong."""
    if entry.arguments is None:
        return arguments
    try:
        struct = msgspec.convert(arguments, entry.arguments)
    except (msgspec.ValidationError, RecursionError) as error:
        expected = ", ".join(entry.input_schema.get("properties", {})) or "none"
        raise ToolError("invalid_args", f"Arguments of {entry.name}: {error}. Its arguments: {expected}.") from None
    return {field: getattr(struct, field) for field in entry.arguments.__struct_fields__}


@contextlib.asynccontextmanager
async def _bounded(what: str, seconds: float, bound: str) -> AsyncIterator[None]:
    """Convert every exception of the block into a ToolError that names `what`.

    `bound` names the setting of `seconds`.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield
    except EnvMessageError as error:
        fault: ToolFault = "invalid_args" if error.code == "VALIDATION_ERROR" else "execution_error"
        raise ToolError(fault, str(error)) from error
    except ToolError:
        raise
    except Exception as error:
        if timeout.expired():
            raise ToolError("timeout", f"{what} took longer than {seconds:.3g} s ({bound}).") from None
        raise ToolError("execution_error", f"{what} raised {type(error).__name__}: {error}") from error


def value_text(name: str, value: Any) -> str:
    """Return what a tool returned as text: itself, or its JSON. Raise ToolError if JSON cannot express it."""
    if isinstance(value, str):
        return value
    try:
        return dumps(value).decode()
    except orjson.JSONEncodeError as error:
        message = (
            f"What the tool {name} returned cannot be written as JSON: {error}. Return str, numbers, lists, dicts."
        )
        raise ToolError("execution_error", message) from error
