"""The grammar of an output accepts exactly the texts that the parser reads as valid calls, or as an answer."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.chat.parsing import parse_message
from verl_server.chat.output import OutputFormat, joined
from verl_server.chat.tool_grammar import output_grammar
from verl_server.chat.tools import ToolChoice, parameter_types, read_tools
from verl_server.errors import BadRequestError
from verl_server.grammar.json_schema import schema_refusal
from verl_server.grammar.source import Grammar, translate

PROPERTIES = {"n": {"$ref": "#/$defs/count"}, "s": {"type": "string"}, "e": {"type": "string", "enum": ["x", "y"]}}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "get", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "stop"}},
    ]
)
REQUIRED, AUTO, NO_CALLS = ToolChoice("required"), ToolChoice("auto"), ToolChoice("none")
SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def tokenizer(special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer of bytes with these added tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", *special])
    made.add_tokens([AddedToken(text, normalized=False) for text in added])
    return made


PLAIN = tokenizer()


@cache
def wrapped(tokens: Tokenizer) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokens.to_str(), eos_token=tokens.token_to_id("<|end|>"))


def accepts(grammar: str, text: str, tokens: Tokenizer = PLAIN) -> bool:
    matcher = llguidance.LLMatcher(wrapped(tokens), grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids = tokens.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def grammar_of(*args: Any, **options: Any) -> str:
    """Return a grammar, of a request that has one."""
    grammar = output_grammar(*args, **options)
    assert grammar is not None
    return grammar


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def xml(*parameters: tuple[str, str], name: str = "get") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


GET = '{"name": "get", "arguments": {"n": 1, "s": "a"}}'
STOP = '{"name": "stop", "arguments": {"any": [1, 2]}}'
GOOD = {
    "hermes": [hermes(GET), hermes(STOP), hermes(GET, STOP)],
    "llama3_json": [GET.replace("arguments", "parameters"), f"{GET}; {STOP}".replace("arguments", "parameters")],
    "mistral": [f"[TOOL_CALLS] [{GET}]", f"[TOOL_CALLS][{GET}, {STOP}]"],
    "qwen3_coder": [
        xml(("n", "1")),
        xml(("n", "1"), ("s", 'a "b" <c>\n</d>'), ("e", "x")),
        f"{xml(('n', '1'))}\n{xml(name='stop')}",
    ],
}
BAD = {
    "hermes": [
        "",
        "Hello",
        GET,
        hermes('{"name": "cut", "arguments": {}}'),
        hermes('{"name": "get", "arguments": {}}'),
        hermes('{"name": "get", "arguments": {"n": "1"}}'),
        hermes('{"name": "get", "arguments": {"n": 1, "more": 1}}'),
        hermes(GET) + " ok",
    ],
    "llama3_json": [STOP, f"{STOP.replace('arguments', 'parameters')} ok"],
    "mistral": [f"[TOOL_CALLS][{GET}", "[TOOL_CALLS][]", f"[TOOL_CALLS]get[ARGS]{{}} {GET}"],
    "qwen3_coder": [xml(("s", "a")), xml(("n", "one")), xml(("n", "1"), ("e", "z")), xml(("m", "1")), xml(name="cut")],
}


@pytest.mark.parametrize("name", list(GOOD))
def test_valid_calls_are_accepted_and_parsed(name: str) -> None:
    format = OutputFormat(name, "none")
    grammar = grammar_of(TOOLS, REQUIRED, format)
    for text in GOOD[name]:
        assert accepts(grammar, text), text
        message = parse_message(format, text, tools=True, thinking_open=False, types=parameter_types(TOOLS))
        assert not message.content and message.tool_calls
        for call in message.tool_calls:
            assert call.name in ("get", "stop") and isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", list(BAD))
def test_other_texts_are_refused(name: str) -> None:
    grammar = grammar_of(TOOLS, REQUIRED, OutputFormat(name, "none"))
    for text in BAD[name]:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("name", list(GOOD))
def test_one_call_and_a_named_tool(name: str) -> None:
    format = OutputFormat(name, "none")
    single = grammar_of(TOOLS, REQUIRED, format, parallel=False)
    named = grammar_of(TOOLS, ToolChoice("required", "get"), format)
    assert accepts(single, GOOD[name][0]) and not accepts(single, GOOD[name][-1])
    assert accepts(named, GOOD[name][0]) and not accepts(named, GOOD[name][-1])


def test_the_reasoning_before_a_call_is_free() -> None:
    format, call = OutputFormat("hermes", "qwen3"), hermes(GET)
    may = grammar_of(TOOLS, REQUIRED, format)
    must = grammar_of(TOOLS, REQUIRED, format, thinking_open=True)
    thought = "<think>\nI <b>think</b>\n</think>\n\n"
    assert accepts(may, thought + call) and accepts(may, call) and not accepts(may, f"Hm {call}")
    assert accepts(must, f"I think\n</think>\n\n{call}") and not accepts(must, call)
    assert accepts(grammar_of(TOOLS, REQUIRED, OutputFormat("hermes", "deepseek-r1")), f"a</think>{call}")


@pytest.mark.parametrize("kind", ["special", "added"])
def test_tags_that_are_tokens(kind: str) -> None:
    tokens = tokenizer(**{kind: SPECIAL})  # type: ignore[arg-type]
    ids: dict[str, Any] = {tag: tokens.token_to_id(tag) for tag in SPECIAL}
    grammar = grammar_of(TOOLS, REQUIRED, OutputFormat("hermes", "qwen3"), special_tokens=ids)
    assert accepts(grammar, f"<think>\nhm\n</think>\n\n{hermes(GET, STOP)}", tokens)
    assert not accepts(grammar, hermes("{}"), tokens)
    grammar = grammar_of(TOOLS, REQUIRED, OutputFormat("mistral", "none"), special_tokens=ids)
    assert accepts(grammar, '[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]stop[ARGS]{}', tokens)
    assert not accepts(grammar, '[TOOL_CALLS]get[ARGS]{"n": "1"}', tokens)


def test_an_answer_of_a_schema() -> None:
    plain = grammar_of([], NO_CALLS, OutputFormat("none", "none"), schema=SCHEMA)
    assert accepts(plain, '{"n": 1}') and not accepts(plain, '{"s": "a"}')
    thinking = grammar_of([], NO_CALLS, OutputFormat("none", "qwen3"), schema=SCHEMA, thinking_open=True)
    assert accepts(thinking, 'hm</think>\n\n{"n": 1}') and not accepts(thinking, '{"n": 1}')


def test_a_format_without_a_grammar_is_refused() -> None:
    for name in ("none", "pythonic"):
        with pytest.raises(BadRequestError, match=f"`{name}`.*tool-call-parser"):
            grammar_of(TOOLS, REQUIRED, OutputFormat(name, "none"))


def test_values_without_quotes_follow_an_enumeration_by_reference() -> None:
    schema = {
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "other": {"anyOf": [{"enum": ["a"]}, {"enum": ["b"]}]}},
        "$defs": {"Unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
        "required": ["unit", "other"],
    }
    tools = read_tools([{"type": "function", "function": {"name": "get", "parameters": schema}}])
    format = OutputFormat("qwen3_coder", "none")
    grammar = grammar_of(tools, REQUIRED, format)
    good = xml(("unit", '"kelvin"'), ("other", '"b"'))
    assert accepts(grammar, good)
    assert not accepts(grammar, xml(("unit", '"miles"'), ("other", '"b"')))
    assert not accepts(grammar, xml(("unit", '"kelvin"'), ("other", '"c"')))
    (call,) = parse_message(format, good, tools=True, thinking_open=False, types=parameter_types(tools)).tool_calls
    assert json.loads(call.arguments) == {"unit": "kelvin", "other": "b"}


# -- what may combine -----------------------------------------------------------------------------------------

ANSWER = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
@pytest.mark.parametrize("name", list(GOOD))
def test_a_schema_beside_tools_permits_calls_or_the_answer(name: str, reasoning: str) -> None:
    format = OutputFormat(name, reasoning)
    grammar = grammar_of(TOOLS, AUTO, format, schema=ANSWER)
    single = grammar_of(TOOLS, AUTO, format, schema=ANSWER, parallel=False)
    thought = "<think>hm</think>" if reasoning == "qwen3" else ""
    for text in (*GOOD[name], '{"sum": 5}'):
        assert accepts(grammar, thought + text) and accepts(grammar, text), text
    for text in (*BAD[name], '{"sum": "5"}', 'So: {"sum": 5}', '{"sum": 5} ok', f'{GOOD[name][0]} {{"sum": 5}}'):
        assert not accepts(grammar, thought + text), text
    assert accepts(single, GOOD[name][0]) and accepts(single, '{"sum": 5}') and not accepts(single, GOOD[name][-1])


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("name", list(GOOD))
def test_calls_and_answers_are_parsed_apart(name: str, chunk: int) -> None:
    format = OutputFormat(name, "qwen3")
    without_quotes = "[TOOL_CALLS]stop[ARGS]{} <tool_call><function=stop></function></tool_call>"
    inside = json.dumps({"sum": 1, "text": f"{GOOD[name][0]} <|python_tag|>{STOP} {without_quotes}"})
    for text, calls in (*((text, True) for text in GOOD[name]), ('{"sum": 5}', False), (inside, False)):
        for thought in ("", "<think>hm</think>\n\n"):
            parser = format.parser(True, False, types=parameter_types(TOOLS), calls_first=True)
            whole = thought + text
            pieces = [whole[at : at + chunk] for at in range(0, len(whole), chunk)]
            deltas = [delta for piece in pieces for delta in parser.push(piece)]
            message = joined([*deltas, *parser.finish()])
            assert bool(message.tool_calls) == calls and message.content == ("" if calls else text)


@pytest.mark.parametrize("name", list(GOOD))
def test_any_json_is_a_schema_and_begins_like_a_call(name: str) -> None:
    """A lexer that reads `{"name": "get", "parameters": ` or `[TOOL_CALLS]` in one piece permits no other JSON."""
    grammar = grammar_of(TOOLS, AUTO, OutputFormat(name, "mistral"), schema=True)
    objects = ["{}", '{"name": 5}', '{"name": "get", "age": 3}', '{"names": "get"}', '{"n": {"a": []}}']
    for text in (*GOOD[name], *objects, "[]", "[1, [2]]", '["T"]', "5", '"x"', "true", "null"):
        assert accepts(grammar, text) and accepts(grammar, f"[THINK]hm[/THINK]{text}"), text
    assert not accepts(grammar, "x")


@pytest.mark.parametrize(
    ("tools", "choice", "options", "says"),
    [
        (TOOLS, REQUIRED, {"constraint": "regex"}, r"in another way \(regex\)"),
        (TOOLS, REQUIRED, {"constraint": "structural_tag"}, r"in another way \(structural_tag\)"),
        (TOOLS, AUTO, {"constraint": "json_schema"}, r"constrained \(json_sch.*JSON schema.*tool_choice to \"none\""),
    ],
)
def test_what_cannot_combine(tools: Any, choice: ToolChoice, options: Any, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        output_grammar(tools, choice, OutputFormat("hermes", "none"), **options)


@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice("required", "get")])
@pytest.mark.parametrize("schema", [ANSWER, True])
def test_a_forced_call_leaves_no_answer_that_a_schema_could_constrain(choice: ToolChoice, schema: Any) -> None:
    for name in GOOD:
        format = OutputFormat(name, "mistral")
        assert grammar_of(TOOLS, choice, format, schema=schema) == grammar_of(TOOLS, choice, format)


@pytest.mark.parametrize(
    ("tools", "choice", "options"),
    [
        (TOOLS, AUTO, {}),
        (TOOLS, AUTO, {"constraint": "structural_tag"}),
        (TOOLS, AUTO, {"constraint": "regex"}),
        (TOOLS, AUTO, {"constraint": "ebnf"}),
        (TOOLS, NO_CALLS, {"constraint": "regex"}),
        ([], NO_CALLS, {"constraint": "json_schema"}),
    ],
)
def test_the_constraint_of_the_request_stays(tools: Any, choice: ToolChoice, options: Any) -> None:
    for name in ("hermes", "none"):
        assert output_grammar(tools, choice, OutputFormat(name, "qwen3"), **options) is None


def test_a_schema_beside_tools_needs_a_format_that_can_be_written() -> None:
    for name in ("none", "pythonic"):
        with pytest.raises(BadRequestError, match=f'`{name}`.*tool_choice to "none"'):
            output_grammar(TOOLS, AUTO, OutputFormat(name, "none"), schema=ANSWER)
        assert accepts(grammar_of(TOOLS, NO_CALLS, OutputFormat(name, "none"), schema=ANSWER), '{"sum": 5}')


def test_an_answer_that_reads_like_a_call_is_refused() -> None:
    schema = {"properties": {"name": {"type": "string"}, "parameters": {"type": "object"}}}
    with pytest.raises(BadRequestError, match="reads like a call"):
        output_grammar(TOOLS, AUTO, OutputFormat("llama3_json", "none"), schema=schema)
    assert grammar_of(TOOLS, AUTO, OutputFormat("hermes", "none"), schema=schema)


# -- schemas that cannot be enforced --------------------------------------------------------------------------


def tools_of(parameters: Any) -> Any:
    unused = {"type": "function", "function": {"name": "get"}}
    return read_tools([unused, {"type": "function", "function": {"name": "search", "parameters": parameters}}])


@pytest.mark.parametrize("name", list(GOOD))
def test_keywords_without_effect_refuse_no_tool(name: str) -> None:
    inner = {"type": "array", "items": {"type": "string", "format": "made-up"}, "uniqueItems": False}
    names = {"propertyNames": {"type": "string"}, "unevaluatedProperties": False, "required": None}
    grammar = grammar_of(tools_of(names | {"properties": {"x": inner}}), REQUIRED, OutputFormat(name, "none"))
    accepts(grammar, "")  # raises for a grammar that llguidance refuses


@pytest.mark.parametrize("choice", [REQUIRED, AUTO])
@pytest.mark.parametrize("name", list(GOOD))
def test_a_keyword_with_an_effect_names_the_tool(name: str, choice: ToolChoice) -> None:
    tools = tools_of({"properties": {"x": {"type": "array", "uniqueItems": True}}})
    schema = ANSWER if choice == AUTO else None
    grammar = translate(
        Grammar("ebnf", grammar_of(tools, choice, OutputFormat(name, "none"), schema=schema)), special_tokens={}
    )
    message = schema_refusal(str(llguidance.LLMatcher.validate_grammar(grammar)), grammar)
    assert message is not None and message.startswith("tools[1] `search`") and "`uniqueItems`" in message
    tools = tools_of({"properties": {"x": {"type": "array", "uniqueItems": True}}, "x-guidance": {"lenient": True}})
    accepts(grammar_of(tools, REQUIRED, OutputFormat(name, "none")), "")


@pytest.mark.parametrize("keyword", [{"anyOf": [{"required": ["x"]}]}, {"minProperties": 1}, {"$ref": "#/$defs/a"}])
def test_keywords_of_all_parameters_are_refused_where_each_is_written_alone(keyword: Any) -> None:
    parameters = {"properties": {"x": {"type": "integer"}}, "$defs": {"a": {}}} | keyword
    with pytest.raises(BadRequestError, match=r"tools\[1\] `search`: .*" + next(iter(keyword)).replace("$", r"\$")):
        output_grammar(tools_of(parameters), REQUIRED, OutputFormat("qwen3_coder", "none"))
    lenient = tools_of(parameters | {"x-guidance": {"lenient": True}})
    assert grammar_of(lenient, REQUIRED, OutputFormat("qwen3_coder", "none"))


def test_a_fixed_text_without_quotes() -> None:
    tools = tools_of({"properties": {"x": {"const": "a"}}, "required": ["x"]})
    grammar = grammar_of(tools, ToolChoice("required", "search"), OutputFormat("qwen3_coder", "none"))
    assert accepts(grammar, xml(("x", "a"), name="search")) and not accepts(grammar, xml(("x", "b"), name="search"))


def test_a_schema_that_nests_too_deeply_names_the_tool() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    tools = tools_of({"properties": {"x": schema | {"type": "array"}}})
    with pytest.raises(BadRequestError, match=r"tools\[1\] `search`.*nests too deeply"):
        output_grammar(tools, REQUIRED, OutputFormat("hermes", "none"))
