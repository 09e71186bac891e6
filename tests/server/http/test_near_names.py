"""The unknown names that count as misspelled."""

from __future__ import annotations

import pytest

from verl_server.server.http.near_names import near_name

KNOWN = ["max_tokens", "temperature", "stop", "n", "logprobs", "top_p", "messages", "rid", "seed", "return_logprob"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_tokenss", "max_tokens"),
        ("temprature", "temperature"),
        ("tempertaure", "temperature"),
        ("temperatura", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("Temperature", "temperature"),
        ("return_logprobs", "return_logprob"),
        ("num_return_sequences", "n"),
        ("topP", "top_p"),
        ("stops", "stop"),
        ("sede", "seed"),
        ("step", None),  # another word
        ("store", None),
        ("id", None),
        ("see", "seed"),
        ("dees", None),
        ("models", None),
        ("do_sample", None),
        ("tempature", None),  # two letters are missing
        ("priority", None),
        ("", None),
    ],
)
def test_near_names(name: str, meant: str | None) -> None:
    assert near_name(name, KNOWN) == meant


def test_a_synonym_needs_its_field() -> None:
    assert near_name("stop_words", ["stop_sequences"]) == "stop_sequences"
    assert near_name("stop_words", ["text"]) is None
