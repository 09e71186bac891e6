"""A model that writes white space wherever it may does not write it without end, in any place with a JSON schema."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from verl_server.chat.output import OutputFormat
from verl_server.chat.tool_grammar import output_grammar
from verl_server.chat.tools import ToolChoice, read_tools
from verl_server.grammar.source import Grammar, Kind, translate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": [1]}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FREE = {"x-guidance": {"whitespace_flexible": True}}
SPACES = b" \t\r\n"
MOST = 60


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return llguidance.LLTokenizer(bytes_only.to_str())


def chat_grammar(schema: Any, choice: ToolChoice, parameters: Any) -> Grammar:
    tools = read_tools([{"type": "function", "function": {"name": "get", "parameters": parameters}}])
    lark = output_grammar(tools, choice, OutputFormat("hermes", "none"), schema=schema)
    assert lark is not None
    return Grammar("ebnf", lark)


def of(kind: Kind, value: Any) -> Grammar:
    return Grammar(kind, json.dumps(value))


FORCED, NONE = ToolChoice("required"), ToolChoice("none")
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
GRAMMARS = {
    "a schema": of("json_schema", SCHEMA),
    "a schema with free white space": of("json_schema", SCHEMA | FREE),
    "any object": of("json_schema", {"type": "object"}),
    "any JSON": of("json_schema", True),
    "a structural tag": of("structural_tag", TAG),
    "arguments": chat_grammar(None, FORCED, SCHEMA),
    "arguments with free white space": chat_grammar(None, FORCED, SCHEMA | FREE),
    "an answer": chat_grammar(SCHEMA, NONE, SCHEMA),
    "an answer with free white space": chat_grammar(SCHEMA | FREE, NONE, SCHEMA),
}


def longest_run(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> int:
    """Return the most characters of white space in a row, if they are taken wherever the grammar permits them."""
    matcher = llguidance.LLMatcher(tokenizer, translate(grammar, {}))
    assert not matcher.is_error(), matcher.get_error()
    by_byte = {tokenizer.decode_bytes([token]): token for token in range(tokenizer.vocab_size)}
    preferred = [by_byte[bytes([each])] for each in b'\n\t\r }][1",:']  # no text, in which spaces would be content
    spaces = {by_byte[bytes([each])] for each in SPACES}
    run = longest = 0
    for _ in range(400):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(tokenizer.vocab_size) if mask[token // 8] >> token % 8 & 1]
        if not allowed or matcher.is_stopped():
            break
        token = next((each for each in preferred if each in allowed), allowed[0])
        run = run + 1 if token in spaces else 0
        longest = max(longest, run)
        assert matcher.consume_token(token)
    return longest


@pytest.mark.parametrize("name", list(GRAMMARS))
def test_white_space_ends(tokenizer: llguidance.LLTokenizer, name: str) -> None:
    assert longest_run(tokenizer, GRAMMARS[name]) <= MOST


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_usual_layouts_are_permitted(tokenizer: llguidance.LLTokenizer, indent: Any) -> None:
    if indent is not None and version("llguidance").startswith("1.7."):
        pytest.skip("llguidance 1.7 repeats a pattern of white space")
    nested = {"type": "object", "properties": {"x": SCHEMA}, "required": ["x"]}
    text = json.dumps({"x": {"a": 1, "b": [1, 1]}}, indent=indent)
    matcher = llguidance.LLMatcher(tokenizer, translate(of("json_schema", nested), {}))
    tokens = tokenizer.tokenize_str(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens)


def test_the_schemas_own_pattern_stays(tokenizer: llguidance.LLTokenizer) -> None:
    own = {"x-guidance": {"whitespace_pattern": r"[\n]*"}}
    assert longest_run(tokenizer, of("json_schema", SCHEMA | own)) > MOST
    plain = {"x-guidance": {"whitespace_flexible": False}}
    assert longest_run(tokenizer, of("json_schema", SCHEMA | plain)) == 0
