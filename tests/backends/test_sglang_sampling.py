"""Settings that the driver of SGLang refuses, by their names. Needs no SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.backends.sglang.sampling import NEEDS_TOKENIZER, UNSUPPORTED, refusal
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(rid="a", input_ids=[1], sampling=SamplingParams(**sampling or {}), **fields)


REFUSED = {
    "allowed_token_ids": request({"allowed_token_ids": [3]}),
    "bad_words": request({"bad_words": ["no"]}, bad_words_ids=[[3]]),
    "ignore_eos with a grammar": request({"ignore_eos": True}, grammar="{}"),
    "return_sampling_mask": request(sampling_mask_num=4),
    "token_ids_logprob": request(token_ids_logprob=[3]),
    "logprobs_mode='raw'": request({"logprobs_mode": "raw"}),
    "logprobs_mode='sampling'": request({"logprobs_mode": "sampling"}),
}
REFUSED_WITHOUT_TOKENIZER = {
    "a grammar": request(grammar="{}"),
    "min_new_tokens": request({"min_new_tokens": 1}),
}
SUPPORTED = [
    request(),
    request({"ignore_eos": True}),
    request({"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "sampling_seed": 7}),
    request({"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {"3": 1.0}}),
    request({"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, priority=1),
]


def test_every_refused_setting_has_a_request_here() -> None:
    assert REFUSED.keys() == UNSUPPORTED.keys()
    assert REFUSED_WITHOUT_TOKENIZER.keys() == NEEDS_TOKENIZER.keys()


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_supported_is_named(name: str, has_tokenizer: bool) -> None:
    assert refusal(REFUSED[name], has_tokenizer) == f"engine='sglang' does not support {name}."
    assert [other for other, is_set in UNSUPPORTED.items() if is_set(REFUSED[name])] == [name]


@pytest.mark.parametrize("name", REFUSED_WITHOUT_TOKENIZER)
def test_a_setting_that_needs_a_tokenizer_is_refused_without_one(name: str) -> None:
    req = REFUSED_WITHOUT_TOKENIZER[name]
    message = refusal(req, has_tokenizer=False)
    assert message is not None and f"a tokenizer for {name}:" in message and "skip_tokenizer_init" in message
    assert refusal(req, has_tokenizer=True) is None


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_other_requests_are_supported(has_tokenizer: bool) -> None:
    assert [refusal(req, has_tokenizer) for req in SUPPORTED] == [None] * len(SUPPORTED)
