"""Incremental text equals the text decoded at once, for any bytes, and stop strings are found across tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from verl_server.models.tiny import byte_tokenizer
from verl_server.server.text.detokenizer import IncrementalDetokenizer, OutputText
from verl_server.server.text.stop_regex import StopRegexes

TOKENIZER = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語テキスト", "🙂🙃 mixed ünïcode\n", " leading and trailing "]
)
def test_pieces_are_certain_and_complete(text: str) -> None:
    detokenizer = IncrementalDetokenizer(decode)
    pieces = [detokenizer.push(token) for token in encode(text)]
    assert "�" not in "".join(pieces), "an incomplete character was returned"
    assert "".join(pieces) + detokenizer.flush() == text


def test_random_bytes_agree_with_decoding_everything() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(0, 261) for _ in range(rng.randrange(1, 60))]
        detokenizer = IncrementalDetokenizer(decode)
        shown = ""
        for end, token in enumerate(ids, start=1):
            shown += detokenizer.push(token)
            assert decode(ids[:end]).startswith(shown)
        assert shown + detokenizer.flush() == decode(ids)


def test_work_per_token_is_bounded_on_undecodable_noise() -> None:
    longest = 0

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer = IncrementalDetokenizer(counting)
    lead = encode("é")[0]  # never followed by its second byte
    for _ in range(2000):
        detokenizer.push(lead)
    assert longest < 600


@pytest.mark.parametrize(
    ("text", "stop", "shown", "consumed"),
    [
        ("hello END more", ["END"], "hello ", "hello END"),
        ("a\n\nb", ["\n\n"], "a", "a\n\n"),
        ("stop at é now", ["é"], "stop at ", "stop at é"),
        ("abcd", ["bcd", "bc"], "a", "abc"),
        ("nothing here", ["absent"], "nothing here", "nothing here"),
    ],
)
def test_stop_string_is_cut_where_it_starts(text: str, stop: list[str], shown: str, consumed: str) -> None:
    output = OutputText(decode, stop, no_stop_trim=False)
    used: list[int] = []
    for token in encode(text):
        used.append(token)
        if output.push(token) is not None:
            break
    output.finish()
    assert output.text == shown
    assert decode(used) == consumed


@pytest.mark.parametrize(
    ("text", "goes_on", "stop", "pattern", "shown", "matched"),
    [
        ("a.b.c", 0, ["."], None, "a", "."),
        ("a.b.c", 1, ["."], None, "a", "."),
        ("a.b.c", 2, ["."], None, "a.b", "."),
        ("a.b.c", 4, ["."], None, "a.b.c", None),
        ("a.b.", 4, ["."], None, "a.b.", None),
        ("xEND", 3, ["END"], None, "x", "END"),  # it ends behind them
        ("xEND END", 4, ["END"], None, "xEND ", "END"),
        ("a1b2c", 2, [], "[0-9]", "a1b", "[0-9]"),
        ("\u00e9\u00e9", 2, ["\u00e9"], None, "\u00e9", "\u00e9"),  # two tokens for each character
        ("\u00e9", 9, ["\u00e9"], None, "\u00e9", None),
    ],
)
def test_stops_behind_the_first_tokens(
    text: str, goes_on: int, stop: list[str], pattern: str | None, shown: str, matched: str | None
) -> None:
    regexes = StopRegexes([pattern]) if pattern else None
    output = OutputText(decode, stop, False, regexes, goes_on=goes_on)
    found = next((m for m in map(output.push, encode(text)) if m), None) or output.finish()
    assert (output.text, found) == (shown, matched)


def test_no_stop_trim_keeps_the_stop_string() -> None:
    output = OutputText(decode, ["END"], no_stop_trim=True)
    matched = [m for m in map(output.push, encode("the END")) if m]
    assert (matched, output.text) == (["END"], "the END")


def test_stream_never_shows_the_start_of_a_stop_string() -> None:
    output = OutputText(decode, ["END", "NIL"], no_stop_trim=False)
    seen = []
    for token in encode("xENxEND"):
        output.push(token)
        seen.append(output.safe_text)
    assert seen == ["x", "x", "x", "xENx", "xENx", "xENx", "xENx"]


def sentencepiece_like() -> Tokenizer:
    """A decoder like that of Llama 2 and Mistral: words with "▁" for spaces, and bytes for everything else."""
    words = ["▁hello", "▁world", "llo", "▁", "é", "▁a"]
    vocab = {token: i for i, token in enumerate([*(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_sentencepiece_spaces_and_byte_fallback() -> None:
    tokenizer = sentencepiece_like()
    smile = list("🙂".encode())
    ids = [256, 257, 259, *smile, 258, 260, *smile, *smile, 261]
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids) == "hello world 🙂lloé🙂🙂 a"
    assert pieces[0] == "hello" and pieces[1] == " world"


def test_special_tokens_in_between_change_nothing() -> None:
    ids = [2, *encode("a"), 3, *encode(" b"), 4, 2]
    detokenizer = IncrementalDetokenizer(decode)
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.flush() == "a b"
