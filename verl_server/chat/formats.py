"""Formats of tool calls and of reasoning: their names, their tags, and which of them a chat template uses.

`output.OutputFormat` chooses among them. A format is a value. `call_readers` reads the text of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_server.chat.call_readers import CallReader, JsonCall, JsonCalls, ParameterTypes
from verl_server.chat.tagged_calls import MistralCalls, PythonCalls, XmlCall
from verl_server.errors import BadRequestError


@dataclass(frozen=True)
class ReasoningFormat:
    """Tags around the reasoning, which precedes the content."""

    open: str
    close: str
    starts_open: bool = False
    """True if the output begins inside the reasoning even if the prompt does not end with the opening tag."""


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model writes tool calls."""

    open: str
    """Tag that begins one call or several."""
    reader: Callable[[ParameterTypes], CallReader]
    """Makes the reader of the text after `open`."""
    close: str = ""
    """Tag that ends the calls that `open` began, or "" if there is none."""
    bare: str = ""
    """Character that begins calls without the tag, at the beginning of the content."""
    inner: tuple[str, ...] = ()
    """Tags inside a call."""
    needs_types: bool = False
    """True if values have no quotes, so that the reader needs the types of parameters."""
    short_ids: bool = False
    """True if the chat template accepts only ids of 9 letters and digits."""


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", lambda types: JsonCall(), close="</tool_call>"),
    "qwen3_coder": ToolFormat("<tool_call>", XmlCall, close="</tool_call>", needs_types=True),
    # Without a tag, an answer of JSON that has a name is no call.
    "llama3_json": ToolFormat("<|python_tag|>", lambda types: JsonCalls("", ";", "", needs_arguments=True), bare="{"),
    "pythonic": ToolFormat("<|python_start|>", lambda types: PythonCalls(), close="<|python_end|>", bare="["),
    "mistral": ToolFormat("[TOOL_CALLS]", lambda types: MistralCalls(), inner=("[CALL_ID]", "[ARGS]"), short_ids=True),
}
_TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_pythonic": "pythonic",
}
"""Other names in SGLang and vLLM -> name in `TOOL_FORMATS`."""

REASONING_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek-r1": ReasoningFormat("<think>", "</think>", starts_open=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
_REASONING_ALIASES = {"deepseek_r1": "deepseek-r1"}

NONE = "none"
"""Setting that switches a format off."""


def tool_format_name(setting: str) -> str:
    """Return the name in `TOOL_FORMATS`, or "none". Raise BadRequestError for an unknown name."""
    return _known("tool_call_parser", setting, _TOOL_ALIASES, [*TOOL_FORMATS])


def reasoning_format_name(setting: str) -> str:
    """Return the name in `REASONING_FORMATS`, or "none". Raise BadRequestError for an unknown name."""
    return _known("reasoning_parser", setting, _REASONING_ALIASES, [*REASONING_FORMATS])


def _known(field: str, setting: str, aliases: dict[str, str], names: list[str]) -> str:
    name = aliases.get(setting, setting)
    if name != NONE and name not in names:
        known = ", ".join(sorted([*names, *aliases, NONE]))
        raise BadRequestError(f"{field} must be one of {known}, not {setting!r:.64}.")
    return name


_TOOL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", NONE),  # the calls of GLM, which have the tag of Hermes
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama3_json"),  # Llama 3.2, whose template has no tag
)
"""Text in a chat template's source -> the format that it shows; the first one that is found counts."""


def detect_tool_format(template: str) -> str:
    """Return the name of the tool format that a chat template's source describes, or "none"."""
    return next((name for mark, name in _TOOL_MARKS if mark in template), NONE)


def detect_reasoning_format(template: str) -> str:
    """Return the name of the reasoning format that a chat template's source describes, or "none"."""
    if "[THINK]" in template:
        return "mistral"
    return "qwen3" if "<think>" in template or "</think>" in template else NONE
