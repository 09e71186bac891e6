"""Log-probabilities name tokens without a loss: same texts stay apart, and parts of characters have their bytes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.server.dialects.openai.conftest import Caller
from verl_server.messages.packed import TokenLogprobs
from verl_server.server.dialects.openai.logprobs import LogprobWriter, Position
from verl_server.server.dialects.openai.protocol import CompletionRequest
from verl_server.server.dialects.openai.tokens import TokenTexts


def texts_of(tokenizer: Tokenizer) -> TokenTexts:
    build: Any = PreTrainedTokenizerFast
    fast = build(tokenizer_object=tokenizer)

    def decoder(skip_special_tokens: bool = True) -> Any:
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    stub: Any = SimpleNamespace(tokenizer=fast, decoder=decoder)
    return TokenTexts(stub)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A trained byte-level BPE tokenizer, with tokens that end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat, the hat: 世界 世界 世上 мир мир " * 20], trainer)
    return tokenizer


def test_bytes_of_byte_level_tokens(byte_level: Tokenizer) -> None:
    texts = texts_of(byte_level)
    for text in ("the cat 世界 мир ✓ é\n", "<end>"):
        ids = byte_level.encode(text).ids
        assert b"".join(map(texts.spelling, ids)) == text.encode()
    pieces = [texts.spelling(i) for i in byte_level.encode("✓").ids]
    assert len(pieces) > 1 and b"".join(pieces) == "✓".encode()  # parts of one character


def test_bytes_of_sentencepiece_tokens() -> None:
    vocab = {"<unk>": 0, "<0xE4>": 1, "<0xB8>": 2, "<0x96>": 3, "▁the": 4, "a": 5, "<0xZZ>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = texts_of(tokenizer)
    assert b"".join(map(texts.spelling, [1, 2, 3])) == "世".encode()
    assert texts.spelling(4) == b" the" and texts.spelling(5) == b"a" and texts.spelling(6) == b"<0xZZ>"


def test_different_tokens_of_one_text_stay_apart(byte_level: Tokenizer) -> None:
    """Two bytes that are no character have one text. The sampled token keeps it, the other has its id as the key."""
    texts = texts_of(byte_level)
    first, second = byte_level.encode("✓").ids[:2]
    assert texts.text(first) == texts.text(second)
    writer = LogprobWriter(texts, CompletionRequest(prompt="a"), 2)
    position = Position(second, -1.0, TokenLogprobs.of([-0.5, -1.0], [first, second]))
    encoded, _ = asyncio.run(writer.completion([position], 0))
    (top,) = json.loads(encoded)["top_logprobs"]
    assert top == {texts.text(second): -1.0, f"token_id:{first}": -0.5}


def test_the_sampled_token_is_among_the_candidates(call: Caller) -> None:
    """The fake scheduler's candidates are the tokens 0 and 1, which are not sampled."""
    (choice,) = call.complete(logprobs=2)["choices"]
    top = choice["logprobs"]["top_logprobs"][0]
    assert list(top) == ["H", "<pad>", "<bos>"] and top["H"] == choice["logprobs"]["token_logprobs"][0]


def test_minus_infinity_is_a_number(byte_level: Tokenizer) -> None:
    writer = LogprobWriter(texts_of(byte_level), CompletionRequest(prompt="a"), 1)
    position = Position(5, -0.25, TokenLogprobs.of([float("-inf")], [6]))
    (entry,) = json.loads(asyncio.run(writer.chat([position])))["content"]
    assert entry["top_logprobs"][0]["logprob"] == -9999.0


def test_offsets_of_a_stream_continue(call: Caller) -> None:
    call.cuts("Hello!", chunk=2)
    frames = call.stream("/v1/completions", prompt="ab", max_tokens=50, logprobs=0, echo=True)
    logprobs = [f["choices"][0]["logprobs"] for f in frames if f["choices"][0]["logprobs"]]
    assert [offset for part in logprobs for offset in part["text_offset"]] == list(range(8))
    assert "".join(token for part in logprobs for token in part["tokens"]) == "abHello!"


def test_prompt_ranks() -> None:
    texts: Any = SimpleNamespace(name_json=lambda token, as_id: b'"x"')
    writer = LogprobWriter(texts, CompletionRequest(prompt="a", prompt_logprobs=1), None)
    prompt: Any = SimpleNamespace(
        token_ids=[3, 4], logprobs=[None, -2.0], ranks=[None, 7], requested=None,
        top=[None, TokenLogprobs.of([-1.0, -1.5], [9, 8])],
    )  # fmt: skip
    state: Any = SimpleNamespace(prompt_logprobs=prompt)
    found = json.loads(asyncio.run(writer.prompt_logprobs(state)))
    assert found == [
        None,
        {
            "4": {"logprob": -2.0, "rank": 7, "decoded_token": "x"},
            "9": {"logprob": -1.0, "rank": 1, "decoded_token": "x"},
        },
    ]
