"""Texts of tokens without transformers: the same in every window, special tokens visible, odd bytes as hex."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel

from tests.watch.site.recorded_runs import write_tokenizer
from verl_server.errors import BadRequestError
from verl_server.watch.site.token_texts import TokenTexts, find_tokenizer


def test_a_token_has_one_text_wherever_the_window_begins(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    texts = TokenTexts(tmp_path / "tokenizer.json")
    tokens = [0, 1, 5, 6, 7, 4, 99]
    whole = texts.texts(tokens)
    assert whole == ["guess", "a", "caf", "<0xC3>", "<0xA9>", "<|end|>", "<99>"]
    assert all(texts.texts(tokens[i:j]) == whole[i:j] for i in range(7) for j in range(i, 8))
    assert [texts.is_special(token) for token in tokens] == [False] * 5 + [True, False]
    assert texts.span_text([5, 6, 7, 4]) == "caf\u00e9<|end|>", "a span is decoded as a whole"


def test_byte_level_spaces_and_whole_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE(vocab={"\u0120caf\u00c3\u00a9": 0, "\u010a": 1, "\u00e2\u0122x": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenTexts(tmp_path / "tokenizer.json").texts([0, 1, 2]) == [" caf\u00e9", "\n", "<0xE2><0x80>x"]


def test_sentencepiece_marks_of_spaces(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"\u2581the": 0, "<0xE2>": 1, "n\x1b": 2}, unk_token="<0xE2>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenTexts(tmp_path / "tokenizer.json").texts([0, 1, 2]) == [" the", "<0xE2>", "n\u241b"]


def test_the_run_names_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("given", "policy", "run/model"):
        write_tokenizer(tmp_path / name)
    run = tmp_path / "run"
    named = {"model_path": str(tmp_path / "policy")}
    assert find_tokenizer(str(tmp_path / "given"), named, run)[0] == tmp_path / "given" / "tokenizer.json"
    assert find_tokenizer(None, named, run)[0] == tmp_path / "policy" / "tokenizer.json"
    assert find_tokenizer(None, {"model_path": "gone", "tokenizer_path": str(tmp_path / "given")}, run)[0] == (
        tmp_path / "given" / "tokenizer.json"
    )
    assert find_tokenizer(None, {"model_path": "nobody/nothing"}, run)[0] == run / "model" / "tokenizer.json"
    file, problem = find_tokenizer("nobody/nothing", named, run)
    assert file is None and "nobody/nothing (--tokenizer)" in problem and "Name a folder" in problem


def test_the_local_cache_of_the_hub_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "models--owner--name" / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file, _ = find_tokenizer(None, {"model_path": "owner/name"}, tmp_path / "run")
    assert file == tmp_path / "models--owner--name" / "snapshots" / "abc" / "tokenizer.json"
    for odd in ("../owner", "/etc", "a/b/c", "", "\x00", "~nobody/x"):
        assert find_tokenizer(odd, {}, tmp_path / "run")[0] is None


def test_a_damaged_tokenizer_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(BadRequestError, match=r"tokenizer\.json cannot be loaded"):
        TokenTexts(file)
