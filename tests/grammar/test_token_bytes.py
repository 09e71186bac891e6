"""The grammar library must read the bytes that the tokenizer's decoder gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.grammar.conftest import EOS, TOKENIZER, VOCAB, encode
from verl_server.errors import BadRequestError
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.source import Grammar, translate
from verl_server.grammar.token_bytes import speller, with_one_kind

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FROM_GGUF = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, SPACES, BYTE_LEVEL]}
"""The decoder of a byte-level tokenizer that transformers 5.17 reads from a GGUF file."""
SENTENCE_PIECE = {"type": "Sequence", "decoders": [SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]}


def tokenizer_json(decoder: Any) -> bytes:
    return json.dumps(json.loads(TOKENIZER.backend_tokenizer.to_str()) | {"decoder": decoder}).encode()


@pytest.mark.parametrize("decoder", [BYTE_LEVEL, FROM_GGUF], ids=["one kind", "two kinds"])
def test_a_grammar_sees_the_bytes_of_each_token(decoder: Any) -> None:
    content = tokenizer_json(decoder)
    text = "a é\n"
    assert Tokenizer.from_str(content.decode()).decode(encode(text)) == text
    spell = speller(Tokenizer.from_str(content.decode()))
    assert b"".join(spell(token) or b"?" for token in encode(text)) == text.encode()
    matcher = GrammarCompiler(content, [EOS], VOCAB).compile(translate(Grammar("regex", "a é\\n"), {})).inner
    tokens = encode(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_tokenizer_that_the_library_reads_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.grammar.compiler.with_one_kind", lambda content: content)
    with pytest.raises(BadRequestError, match=r"llguidance reads token \d+ as .*grammar_backend=none"):
        GrammarCompiler(tokenizer_json(FROM_GGUF), [EOS], VOCAB)


def test_other_decoders_stay() -> None:
    for decoder in (None, BYTE_LEVEL, SENTENCE_PIECE):
        content = json.loads(tokenizer_json(decoder))
        assert with_one_kind(content) is content


def test_the_pieces_of_sentence_piece() -> None:
    spell = speller(Tokenizer.from_str(tokenizer_json(SENTENCE_PIECE).decode()))
    assert spell(encode("a")[0]) == b"a"
    assert speller(None)(3) is None
