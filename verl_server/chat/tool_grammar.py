"""`output_grammar` decides which constraints of a chat's output may be combined, and writes their grammar.

All dialects with chats use it. The grammars are Lark in llguidance's dialect, for `SamplingParams.ebnf`. The reasoning
before calls and answers is not constrained. `output.OutputParser` parses the outputs that the grammars permit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from verl_server.chat.call_readers import TEXT
from verl_server.chat.output import OutputFormat
from verl_server.chat.tools import Tool, ToolChoice, parameter_types
from verl_server.errors import BadRequestError
from verl_server.grammar.json_schema import enforceable_schema, marked_rule, with_layout

_PLAIN_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after commas and colons, as chat templates write JSON. Free white space might never end."""
_ANSWER = "the answer's schema"
"""Owner of the schema of the answer, in errors."""
_FORCED_AND_OTHER = (
    "tool_choice requires a tool call, and the output is constrained in another way ({constraint}): leave one of them "
    "out. A JSON schema may stay: it concerns the answer, which such an output does not have."
)
_OFFERED_AND_OTHER = (
    "The output is constrained ({constraint}), and `tools` offers calls, which such a constraint excludes. Use a JSON "
    'schema as the constraint, which leaves the choice between a call and an answer, or set tool_choice to "none".'
)
_MAY_DESCRIBE_CALLS = frozenset({"regex", "ebnf", "structural_tag"})
"""Constraints of text, which may hold calls in the tool format of the model."""
_OTHER_PARSER = "start the server with another --tool-call-parser"


def output_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    format: OutputFormat,
    *,
    schema: Mapping[str, Any] | Literal[True] | None = None,
    constraint: str | None = None,
    parallel: bool = True,
    thinking_open: bool = False,
    special_tokens: Mapping[str, int] | None = None,
) -> str | None:
    """Return the grammar as Lark, or None if the request's own constraint, if any, is all that applies.

    `tools` are those of the request. `schema` is the JSON schema of the answer (true: any JSON), and `constraint` the
    name of the sampling parameter with another constraint (`regex`, ...). At most one of the two is set.

    | choice | schema | grammar |
    |---|---|---|
    | required | no | calls |
    | required | yes | calls: the schema concerns the answer, and there is none |
    | auto | no | none |
    | auto | yes | calls, or an answer of the schema |
    | none, or no tools | yes | an answer of the schema |

    With auto, a `regex`, an `ebnf` or a `structural_tag` describes the whole output. The output is parsed as ever, so
    the constraint may describe calls. Beside tools, other constraints are refused. OpenAI and vLLM accept
    `response_format` beside a forced call, and return the call.

    `parallel` permits several calls. With `thinking_open` the prompt ends inside the reasoning, which the output then
    must close. `special_tokens`: tag -> id, for the tags of the format that are single tokens of the tokenizer, because
    a grammar distinguishes them from text. Raise BadRequestError for what cannot be combined or written.
    """
    is_offered = bool(tools) and choice.mode == "auto"
    if choice.is_forced and constraint is not None:
        raise BadRequestError(_FORCED_AND_OTHER.format(constraint=constraint))
    if is_offered and constraint is not None and constraint not in _MAY_DESCRIBE_CALLS:
        raise BadRequestError(_OFFERED_AND_OTHER.format(constraint=constraint))
    if constraint is not None or (schema is None and not choice.is_forced):
        return None
    lark = _Lark(special_tokens or {})
    parts: list[str] = []
    if choice.is_forced or is_offered:
        parts.append(_calls(lark, tools, choice, format, parallel))
    if schema is not None and not choice.is_forced:
        if is_offered:
            _check_answer(schema, format)
        parts.append(lark.json(_ANSWER, {} if schema is True else schema))
    return lark.grammar(_after_reasoning(lark, lark.one_of(parts), format, thinking_open))


def _calls(lark: _Lark, tools: Sequence[Tool], choice: ToolChoice, format: OutputFormat, parallel: bool) -> str:
    write = _WRITERS.get(format.tools)
    if write is None:
        known = ", ".join(sorted(_WRITERS))
        served = f"the tool format of the served model is `{format.tools}`, and calls can be constrained for {known}."
        if choice.is_forced:
            raise BadRequestError(
                f"tool_choice cannot require a call: {served} Use tool_choice auto, or {_OTHER_PARSER}."
            )
        raise BadRequestError(
            "The answer has a schema and `tools` offers calls, so both must be constrained: "
            f'{served} Set tool_choice to "none", or {_OTHER_PARSER}.'
        )
    owners = {f"tools[{i}] `{tool.name}`": tool for i, tool in enumerate(tools) if choice.name in (None, tool.name)}
    return write(lark, owners, parallel)


def _check_answer(schema: Mapping[str, Any] | Literal[True], format: OutputFormat) -> None:
    """Raise BadRequestError if the parser would read an answer as a call, in a format whose calls may have no tag."""
    tools = format.tool_format
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    names = properties.keys() if isinstance(properties, dict) else set()
    if tools is not None and tools.bare == "{" and "name" in names and names & {"arguments", "parameters"}:
        raise BadRequestError(
            "The answer's schema has `name` and `parameters` or `arguments`, so an answer reads like a call in the "
            f'tool format `{format.tools}` of the served model. Rename these properties, or set tool_choice to "none".'
        )


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
        if tag in self.special_tokens:
            return f"<[{self.special_tokens[tag]}]>"
        # A list of JSON may stand in the same place, and the lexer cannot go back from a longer lexeme.
        return f"{self.text('[')} {self.text(tag[1:])}" if tag.startswith("[") else self.text(tag)

    def text(self, text: str) -> str:
        """Match exactly this text."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, owner: str, schema: Mapping[str, Any]) -> str:
        """Match a JSON value of the schema. `owner` names the schema in errors."""
        name = f"json{len(self._rules)}"
        try:
            self._rules.append(marked_rule(name, owner, with_layout(enforceable_schema(schema), **_PLAIN_JSON)))
        except (BadRequestError, RecursionError):
            raise BadRequestError(f"{owner}: the JSON schema nests too deeply. Use a simpler schema.") from None
        return name

    def arguments(self, owner: str, tool: Tool) -> str:
        """Match the arguments of a tool."""
        schema = tool.parameters or {}
        return self.json(owner, schema if schema.get("type") == "object" else {**schema, "type": "object"})

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
        if len(expressions) == 1:
            return expressions[0]
        name = f"any{len(self._rules)}"
        self._rules.append(f"{name}: " + "\n    | ".join(expressions))
        return name

    def grammar(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules, ""))


Owners = Mapping[str, Tool]
"""Owner of a schema, as errors name it (`tools[2] `search``) -> the tool."""


def _list(call: str, separator: str, parallel: bool) -> str:
    """Match one call or, with `parallel`, several with a separator between them."""
    return f"{call} ({separator} {call})*" if parallel else call


def _json_calls(lark: _Lark, tools: Owners, arguments: str) -> str:
    """Match one call of any of the tools, as a JSON object."""
    calls = []
    for owner, tool in tools.items():
        # In the lexemes of `%json`: the lexer cannot go back from a longer one, where an answer of JSON may stand, too.
        head = ("{", '"name"', ": ", json.dumps(tool.name), ", ", f'"{arguments}"', ": ")
        calls.append(" ".join((*map(lark.text, head), lark.arguments(owner, tool), lark.text("}"))))
    return lark.one_of(calls)


def _tagged(lark: _Lark, call: str, parallel: bool) -> str:
    """Match one call or several, each on lines of its own between the tags of Hermes and Qwen3-Coder."""
    tagged = f'{lark.tag("<tool_call>")} "\\n" {call} "\\n" {lark.tag("</tool_call>")}'
    return _list(tagged, '"\\n"', parallel)


def _hermes(lark: _Lark, tools: Owners, parallel: bool) -> str:
    return _tagged(lark, _json_calls(lark, tools, "arguments"), parallel)


def _llama3(lark: _Lark, tools: Owners, parallel: bool) -> str:
    call = _json_calls(lark, tools, "parameters")
    return _list(call, '"; "', parallel)


def _mistral(lark: _Lark, tools: Owners, parallel: bool) -> str:
    opening = lark.tag("[TOOL_CALLS]")
    if "[ARGS]" not in lark.special_tokens:  # a tokenizer from before version 11 of the format
        call = _json_calls(lark, tools, "arguments")
        calls = _list(call, '", "', parallel)
        return f'{opening} / ?/ "[" {calls} "]"'
    middle = lark.tag("[ARGS]")
    named = lark.one_of(
        [f"{lark.text(tool.name)} {middle} {lark.arguments(owner, tool)}" for owner, tool in tools.items()]
    )
    return _list(f"{opening} {named}", "", parallel)


def _qwen3_coder(lark: _Lark, tools: Owners, parallel: bool) -> str:
    return _tagged(lark, lark.one_of([_xml_call(lark, owner, tool) for owner, tool in tools.items()]), parallel)


_NOT_OF_PROPERTIES = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
)
"""Keywords of an object's schema that bind several properties, or the object as a whole."""


def _check_xml(owner: str, schema: Mapping[str, Any]) -> None:
    """Raise BadRequestError for keywords that a grammar of one parameter after the other does not enforce."""
    found = enforceable_schema(schema)
    if names := ", ".join(f"`{name}`" for name in _NOT_OF_PROPERTIES if name in found):
        raise BadRequestError(
            f"{owner}: the output cannot be constrained to this JSON schema: {names} of all parameters cannot be "
            f'enforced in the tool format of the served model. Leave {names} out, or use tool_choice "auto" without a '
            'schema of the answer, or set "x-guidance": {"lenient": true} in the schema to enforce the rest.'
        )


_XML_END = r'"\n</parameter>\n"'


def _xml_call(lark: _Lark, owner: str, tool: Tool) -> str:
    schema = tool.parameters or {}
    own = schema.get("x-guidance")
    if not (isinstance(own, dict) and own.get("lenient")):
        _check_xml(owner, schema)
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    types = parameter_types([tool])[tool.name]
    parts = [lark.text(f"<function={tool.name}>\n")]
    required = schema.get("required") or []
    for key, value in (schema.get("properties") or {}).items():
        opening = lark.text(f"<parameter={key}>\n")
        value = value if isinstance(value, dict) else {}
        enum = value.get("enum", [value["const"]] if "const" in value else [])
        values = [each for each in enum if isinstance(each, str)] if isinstance(enum, list) else []
        if types[key] != TEXT:
            part = f"{opening} {lark.json(f'{owner}, parameter {json.dumps(key)}', {**value, **shared})} {_XML_END}"
        elif values:
            part = f"{opening} {lark.one_of([lark.text(each) for each in values])} {_XML_END}"
        else:
            part = f'{opening} {lark.text_until("</parameter>")} "\\n"'
        parts.append(part if key in required else f"({part})?")
    return " ".join((*parts, lark.text("</function>")))


_WRITERS: dict[str, Callable[[_Lark, Owners, bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}
"""Name of a tool format -> function that returns the expression of its calls."""
