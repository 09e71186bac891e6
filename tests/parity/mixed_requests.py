"""Requests that mix all sampling settings at random, for a `Scheduler` in this process and for an `Engine`.

`sampling_judge` says what their outputs must be.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.grammar.conftest import EOS, TOKENIZER, VOCAB, encode
from tests.parity.harness import random_prompt
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.source import grammar_of, translate
from verl_server.messages.io_struct import GrammarTokenizer, TokenizedGenerateReq
from verl_server.sampling_params import GRAMMARS, SamplingParams

REGEXES = ("[a-f]{6,60}", "(ab|cd|ef){3,20}", "[0-9]+(-[0-9]{2}){1,6}", "x[^b]*")
LETTERS = "abcdefghijkl"
FEATURES = ("penalties", "logit_bias", "min_new_tokens", "filters", "grammar", "bad_words", "candidates", "prompt")
"""What `MixedRequest.features` may return."""

_TOKENIZER_JSON = TOKENIZER.backend_tokenizer.to_str().encode()
_COMPILER = GrammarCompiler(_TOKENIZER_JSON, [EOS], VOCAB)


def grammar_tokenizer() -> GrammarTokenizer:
    """Return the message that lets a scheduler compile grammars."""
    return GrammarTokenizer(tokenizer=_TOKENIZER_JSON, eos_token_ids=[EOS])


@dataclass(frozen=True)
class MixedRequest:
    prompt: list[int]
    params: dict[str, Any]
    """`sampling_params` as a caller writes them."""
    top: int = 0
    ids: list[int] | None = None
    start: int = -1
    """`logprob_start_len`"""
    mask: bool = False
    """`return_sampling_mask`"""
    seed: int | None = None
    """The seed that the scheduler chose, if `params` has none."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams.parse(self.params)

    @property
    def stop_ids(self) -> list[int]:
        sampling = self.sampling
        return [] if sampling.ignore_eos else [EOS, *(sampling.stop_token_ids or [])]

    @property
    def bad_words_ids(self) -> list[list[int]]:
        """The tokens of each word: bytes, so that a leading space is a token of its own, and changes nothing."""
        return [encode(word) for word in self.sampling.bad_words or []]

    @property
    def grammar(self) -> str:
        """The translated grammar, "" for none."""
        grammar = grammar_of(self.sampling)
        return "" if grammar is None else translate(grammar, {})

    @property
    def features(self) -> set[str]:
        """Return which of `FEATURES` the request has."""
        p = self.sampling
        has = {
            "penalties": p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty,
            "logit_bias": p.logit_bias,
            "min_new_tokens": p.min_new_tokens and self.stop_ids,
            "filters": p.is_filtered,
            "grammar": self.grammar,
            "bad_words": any(len(word) > 1 for word in self.bad_words_ids),
            "candidates": self.top or self.ids,
            "prompt": self.start >= 0,
        }
        return {name for name in FEATURES if has[name]}

    def sample(self, k: int) -> MixedRequest:
        """Return sample `k` of a request with `n`."""
        return dataclasses.replace(self, seed=self.params["sampling_seed"] + k)

    def seeded(self, seed: int) -> MixedRequest:
        return dataclasses.replace(self, seed=seed)

    def body(self) -> dict[str, Any]:
        """Return the arguments of `Engine.generate`."""
        return {
            "input_ids": self.prompt,
            "sampling_params": self.params,
            "return_logprob": True,
            "logprob_start_len": self.start,
            "top_logprobs_num": self.top,
            "token_ids_logprob": self.ids,
            "return_sampling_mask": self.mask,
        }

    def message(self, rid: str, **fields: Any) -> TokenizedGenerateReq:
        """Return what the TokenizerManager sends to the scheduler."""
        sampling = self.sampling
        for name in GRAMMARS:
            setattr(sampling, name, None)
        return TokenizedGenerateReq(
            rid=rid,
            input_ids=list(self.prompt),
            sampling=sampling,
            stop_ids=self.stop_ids,
            return_logprob=True,
            logprob_start_len=self.start,
            top_logprobs_num=self.top,
            token_ids_logprob=self.ids,
            sampling_mask_num=2 * sampling.top_k if self.mask else 0,
            bad_words_ids=self.bad_words_ids,
            grammar=self.grammar,
            **fields,
        )


def allowed_by_grammar(request: MixedRequest, output_ids: list[int]) -> Iterator[set[int] | None]:
    """Return which tokens the grammar allows at each position of the output and after it; None without a grammar."""
    if not request.grammar:
        yield from [None] * (len(output_ids) + 1)
        return
    matcher = _COMPILER.compile(request.grammar)
    words = np.zeros(_COMPILER.num_words, dtype=np.int32)
    for index in range(len(output_ids) + 1):
        if matcher.is_complete:
            yield set()
            continue
        matcher.write_mask(words.ctypes.data, words.nbytes)
        allowed = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), count=VOCAB, bitorder="little")).tolist())
        yield allowed | set(request.stop_ids) if EOS in allowed else allowed
        if index < len(output_ids) and output_ids[index] not in request.stop_ids:
            assert matcher.inner.consume_token(output_ids[index]), "the grammar does not allow this token"


def mixed_request(rng: random.Random, prompt: list[int], most_new: int, seeded: bool = True) -> MixedRequest:
    """Return a request with random settings, of which every one has a share of the requests."""
    new = rng.randint(max(1, most_new // 3), most_new)
    params: dict[str, Any] = {
        "max_new_tokens": new,
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.0, 1.4]),
        "top_k": rng.choice([-1, -1, 1, 6, 40]),
        "top_p": rng.choice([1.0, 1.0, 0.9, 0.5]),
        "min_p": rng.choice([0.0, 0.0, 0.05]),
        "logprobs_mode": rng.choice(["default", "default", "raw", "sampling"]),
        "ignore_eos": rng.random() < 0.5,
    }
    if seeded:
        params["sampling_seed"] = rng.randrange(-(2**62), 2**62)
    if rng.random() < 0.5:
        params |= {
            "frequency_penalty": rng.choice([0.0, 0.6, -0.4]),
            "presence_penalty": rng.choice([0.0, 0.8]),
            "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
        }
    if rng.random() < 0.3:
        params["logit_bias"] = {str(token): rng.uniform(-4, 4) for token in rng.sample(range(VOCAB), 6)}
    kind = rng.choice(["free", "letters", "grammar", "grammar", "stops"])
    if kind == "letters":  # so few tokens that bad words of two tokens matter
        letters = "".join(rng.sample(LETTERS, 6))
        params["allowed_token_ids"] = encode(letters)
        params["bad_words"] = [first + second for first in letters for second in rng.sample(letters, 2)] + [letters[5]]
        params["ignore_eos"] = True
    elif kind == "grammar":
        params |= {"regex": rng.choice(REGEXES), "ignore_eos": False}
    elif kind == "stops":
        stops = rng.sample(range(5, VOCAB), 30)
        params |= {"stop_token_ids": stops, "min_new_tokens": rng.randint(new // 2, new), "ignore_eos": False}
    return MixedRequest(
        prompt,
        params,
        top=rng.choice([0, 0, 3, 7]),
        ids=rng.choice([None, None, rng.sample(range(VOCAB), 4)]),
        start=rng.choice([-1, -1, 0, len(prompt) // 2]),
        mask=params["top_k"] >= 1 and rng.random() < 0.5,
    )


def greedy_request(prompt: list[int], new: int, **fields: Any) -> MixedRequest:
    return MixedRequest(prompt, {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}, **fields)


def prompts_in_families(rng: random.Random, count: int, longest: int = 60) -> list[list[int]]:
    """Return prompts of up to `longest` tokens, of which two thirds share their beginnings with others."""
    beginnings = [random_prompt(longest * share // 60, 900 + share) for share in (8, 16, 29, 40)]
    prompts = []
    for i in range(count):
        own = random_prompt(rng.randint(1, longest // 3 if i % 3 else longest * 5 // 6), 1000 + rng.randrange(10**6))
        prompts.append(rng.choice(beginnings) + own if i % 3 else own)
    return prompts
