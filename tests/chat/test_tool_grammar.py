"""The grammar of forced calls accepts exactly the texts that the parser reads as valid calls of the tools."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from verl_server.chat.output import OutputFormat, parse_message
from verl_server.chat.tool_grammar import answer_grammar, forced_call_grammar
from verl_server.chat.tools import ToolChoice, parameter_types, read_tools
from verl_server.errors import BadRequestError

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
REQUIRED = ToolChoice("required")
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


def accepts(grammar: str, text: str, tokens: Tokenizer = PLAIN) -> bool:
    wrapped = llguidance.LLTokenizer(tokens.to_str(), eos_token=tokens.token_to_id("<|end|>"))
    matcher = llguidance.LLMatcher(wrapped, grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids = tokens.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


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
    grammar = forced_call_grammar(TOOLS, REQUIRED, format)
    for text in GOOD[name]:
        assert accepts(grammar, text), text
        message = parse_message(format, text, tools=True, thinking_open=False, types=parameter_types(TOOLS))
        assert not message.content and message.tool_calls
        for call in message.tool_calls:
            assert call.name in ("get", "stop") and isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", list(BAD))
def test_other_texts_are_refused(name: str) -> None:
    grammar = forced_call_grammar(TOOLS, REQUIRED, OutputFormat(name, "none"))
    for text in BAD[name]:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("name", list(GOOD))
def test_one_call_and_a_named_tool(name: str) -> None:
    format = OutputFormat(name, "none")
    single = forced_call_grammar(TOOLS, REQUIRED, format, parallel=False)
    named = forced_call_grammar(TOOLS, ToolChoice("required", "get"), format)
    assert accepts(single, GOOD[name][0]) and not accepts(single, GOOD[name][-1])
    assert accepts(named, GOOD[name][0]) and not accepts(named, GOOD[name][-1])


def test_the_reasoning_before_a_call_is_free() -> None:
    format, call = OutputFormat("hermes", "qwen3"), hermes(GET)
    may = forced_call_grammar(TOOLS, REQUIRED, format)
    must = forced_call_grammar(TOOLS, REQUIRED, format, thinking_open=True)
    thought = "<think>\nI <b>think</b>\n</think>\n\n"
    assert accepts(may, thought + call) and accepts(may, call) and not accepts(may, f"Hm {call}")
    assert accepts(must, f"I think\n</think>\n\n{call}") and not accepts(must, call)
    assert accepts(forced_call_grammar(TOOLS, REQUIRED, OutputFormat("hermes", "deepseek-r1")), f"a</think>{call}")


@pytest.mark.parametrize("kind", ["special", "added"])
def test_tags_that_are_tokens(kind: str) -> None:
    tokens = tokenizer(**{kind: SPECIAL})  # type: ignore[arg-type]
    ids: dict[str, Any] = {tag: tokens.token_to_id(tag) for tag in SPECIAL}
    grammar = forced_call_grammar(TOOLS, REQUIRED, OutputFormat("hermes", "qwen3"), special_tokens=ids)
    assert accepts(grammar, f"<think>\nhm\n</think>\n\n{hermes(GET, STOP)}", tokens)
    assert not accepts(grammar, hermes("{}"), tokens)
    grammar = forced_call_grammar(TOOLS, REQUIRED, OutputFormat("mistral", "none"), special_tokens=ids)
    assert accepts(grammar, '[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]stop[ARGS]{}', tokens)
    assert not accepts(grammar, '[TOOL_CALLS]get[ARGS]{"n": "1"}', tokens)


def test_an_answer_of_a_schema() -> None:
    plain = answer_grammar(SCHEMA, OutputFormat("none", "none"))
    assert accepts(plain, '{"n": 1}') and not accepts(plain, '{"s": "a"}')
    thinking = answer_grammar(SCHEMA, OutputFormat("none", "qwen3"), thinking_open=True)
    assert accepts(thinking, 'hm</think>\n\n{"n": 1}') and not accepts(thinking, '{"n": 1}')


def test_a_format_without_a_grammar_is_refused() -> None:
    for name in ("none", "pythonic"):
        with pytest.raises(BadRequestError, match=f"`{name}`.*tool-call-parser"):
            forced_call_grammar(TOOLS, REQUIRED, OutputFormat(name, "none"))


def test_values_without_quotes_follow_an_enumeration_by_reference() -> None:
    schema = {
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "other": {"anyOf": [{"enum": ["a"]}, {"enum": ["b"]}]}},
        "$defs": {"Unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
        "required": ["unit", "other"],
    }
    tools = read_tools([{"type": "function", "function": {"name": "get", "parameters": schema}}])
    format = OutputFormat("qwen3_coder", "none")
    grammar = forced_call_grammar(tools, REQUIRED, format)
    good = xml(("unit", '"kelvin"'), ("other", '"b"'))
    assert accepts(grammar, good)
    assert not accepts(grammar, xml(("unit", '"miles"'), ("other", '"b"')))
    assert not accepts(grammar, xml(("unit", '"kelvin"'), ("other", '"c"')))
    (call,) = parse_message(format, good, tools=True, thinking_open=False, types=parameter_types(tools)).tool_calls
    assert json.loads(call.arguments) == {"unit": "kelvin", "other": "b"}
