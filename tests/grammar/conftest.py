"""A compiler of grammars for the tokenizer of one token for each byte."""

from __future__ import annotations

import pytest

from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.source import Grammar, Kind, translate
from verl_server.models.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = 2
VOCAB = 320


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.backend_tokenizer.to_str().encode(), [EOS], VOCAB)


def accepts(compiler: GrammarCompiler, kind: Kind, text: str, output: str) -> bool:
    """Return True if `output` is complete under the grammar."""
    matcher = compiler.compile(translate(Grammar(kind, text), {})).inner
    tokens = encode(output)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
