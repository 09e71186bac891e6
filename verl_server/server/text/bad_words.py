"""`bad_words_ids`: the token sequences of `SamplingParams.bad_words`. The TokenizerManager sends them to the scheduler.

A word is tokenized with and without a leading space, because tokenizers have other tokens for a word inside a text. The
second form counts if it differs in its first token and has the same number of tokens: otherwise its first token is a
space, and its last tokens are those of the first form. Source: vLLM's `bad_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_server.errors import BadRequestError


def bad_words_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token sequences of `words`. `encode` adds no special tokens. Raise BadRequestError for a word without
    tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if not plain:
            raise BadRequestError(f"sampling_params.bad_words has a word without tokens: {word!r:.100}.")
        found[tuple(plain)] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[tuple(spaced)] = None
    return [list(ids) for ids in found]
