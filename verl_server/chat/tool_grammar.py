"""Grammars of a chat's output: `forced_call_grammar` permits only valid tool calls, `answer_grammar` only JSON.

Both leave the reasoning before them free. Dialects use the first for `tool_choice` "required" and for a named tool. The
grammars are Lark in llguidance's dialect, for `SamplingParams.ebnf`. `output.OutputParser` parses what they permit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_server.chat.call_readers import TEXT
from verl_server.chat.output import OutputFormat
from verl_server.chat.tools import Tool, ToolChoice, parameter_types
from verl_server.errors import BadRequestError

_PLAIN_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after commas and colons, as chat templates write JSON. Free white space might never end."""


def forced_call_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    format: OutputFormat,
    *,
    parallel: bool = True,
    thinking_open: bool = False,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """Return the grammar as Lark.

    `choice` selects the tools, and `parallel` permits several calls. The reasoning before the calls stays free; with
    `thinking_open` the prompt ends inside the reasoning, which the output then must close. `special_tokens`: tag -> id,
    for the tags of the format that are single tokens of the tokenizer, because a grammar distinguishes them from text.
    Raise BadRequestError if calls of the format cannot be forced.
    """
    write = _WRITERS.get(format.tools)
    if write is None:
        known = ", ".join(sorted(_WRITERS))
        raise BadRequestError(
            f"tool_choice cannot require a call: the tool format of the served model is `{format.tools}`, and calls "
            f"can be forced for {known}. Use tool_choice auto, or start the server with another --tool-call-parser."
        )
    lark = _Lark(special_tokens or {})
    calls = write(lark, [tool for tool in tools if choice.name in (None, tool.name)], parallel)
    return lark.grammar(_after_reasoning(lark, calls, format, thinking_open))


def answer_grammar(
    schema: Mapping[str, Any],
    format: OutputFormat,
    *,
    thinking_open: bool = False,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """Return the grammar, as Lark, of an answer that is JSON of this schema. The arguments are explained above."""
    lark = _Lark(special_tokens or {})
    return lark.grammar(_after_reasoning(lark, lark.json(schema), format, thinking_open))


def _after_reasoning(lark: _Lark, expression: str, format: OutputFormat, thinking_open: bool) -> str:
    reasoning = format.reasoning_format
    if reasoning is None:
        return expression
    thought = f"{lark.text_until(reasoning.close)} /[ \\n]{{0,4}}/"
    if thinking_open or reasoning.starts_open:
        return f"{thought} {expression}"
    return f"({lark.tag(reasoning.open)} {thought})? {expression}"


class _Lark:
    """Parts of a Lark grammar. Each method returns an expression."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.special_tokens = special_tokens
        self._rules: list[str] = []

    def tag(self, tag: str) -> str:
        """Match a tag."""
        return f"<[{self.special_tokens[tag]}]>" if tag in self.special_tokens else self.text(tag)

    def text(self, text: str) -> str:
        """Match exactly this text."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Match a JSON value of the schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': _PLAIN_JSON})}"

    def arguments(self, tool: Tool) -> str:
        """Match the arguments of a tool."""
        return self.json({"type": "object", **(tool.parameters or {})})

    def text_until(self, tag: str) -> str:
        """Match any text up to and including the first occurrence of the tag."""
        name = f"text{len(self._rules)}"
        if tag in self.special_tokens:
            self._rules.append(f"{name}: /(?s:.*)/")
            return f"{name} {self.tag(tag)}"
        self._rules.append(f"{name}[suffix={self.text(tag)}]: /(?s:.*)/")
        return name

    def one_of(self, expressions: Sequence[str]) -> str:
        """Match one of several expressions."""
        name = f"any{len(self._rules)}"
        self._rules.append(f"{name}: " + "\n    | ".join(expressions))
        return name

    def grammar(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules, ""))


def _list(call: str, separator: str, parallel: bool) -> str:
    """Match one call or, with `parallel`, several with a separator between them."""
    return f"{call} ({separator} {call})*" if parallel else call


def _json_call(lark: _Lark, tool: Tool, arguments: str) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
    return f"{lark.text(head)} {lark.arguments(tool)} {lark.text('}')}"


def _hermes(lark: _Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.one_of([_json_call(lark, tool, "arguments") for tool in tools])
    tagged = f'{lark.tag("<tool_call>")} "\\n" {call} "\\n" {lark.tag("</tool_call>")}'
    return _list(tagged, '"\\n"', parallel)


def _llama3(lark: _Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.one_of([_json_call(lark, tool, "parameters") for tool in tools])
    return _list(call, '"; "', parallel)


def _mistral(lark: _Lark, tools: Sequence[Tool], parallel: bool) -> str:
    opening = lark.tag("[TOOL_CALLS]")
    if "[ARGS]" not in lark.special_tokens:  # a tokenizer from before version 11 of the format
        call = lark.one_of([_json_call(lark, tool, "arguments") for tool in tools])
        calls = _list(call, '", "', parallel)
        return f'{opening} / ?/ "[" {calls} "]"'
    middle = lark.tag("[ARGS]")
    named = lark.one_of([f"{lark.text(tool.name)} {middle} {lark.arguments(tool)}" for tool in tools])
    return _list(f"{opening} {named}", "", parallel)


def _qwen3_coder(lark: _Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.one_of([_xml_call(lark, tool) for tool in tools])
    tagged = f'{lark.tag("<tool_call>")} "\\n" {call} "\\n" {lark.tag("</tool_call>")}'
    return _list(tagged, '"\\n"', parallel)


_XML_END = r'"\n</parameter>\n"'


def _xml_call(lark: _Lark, tool: Tool) -> str:
    schema = tool.parameters or {}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    types = parameter_types([tool])[tool.name]
    parts = [lark.text(f"<function={tool.name}>\n")]
    for key, value in schema.get("properties", {}).items():
        opening = lark.text(f"<parameter={key}>\n")
        value = value if isinstance(value, dict) else {}
        values = [each for each in value.get("enum", []) if isinstance(each, str)]
        if types[key] != TEXT:
            part = f"{opening} {lark.json({**value, **shared})} {_XML_END}"
        elif values:
            part = f"{opening} {lark.one_of([lark.text(each) for each in values])} {_XML_END}"
        else:
            part = f'{opening} {lark.text_until("</parameter>")} "\\n"'
        parts.append(part if key in schema.get("required", []) else f"({part})?")
    return " ".join((*parts, lark.text("</function>")))


_WRITERS: dict[str, Callable[[_Lark, Sequence[Tool], bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}
"""Name of a tool format -> function that returns the expression of its calls."""
