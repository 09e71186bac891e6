"""The bounds of what a request may ask for, each at its last valid value and one beyond."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.errors import BadRequestError, ContextLengthError
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.request_checks import check_request

VOCAB, CONTEXT, CAPACITY = 100, 32, 20


def check(ids: list[int], new: int | None = 1, **fields: Any) -> None:
    message = TokenizedGenerateReq(rid="a", input_ids=ids, sampling=SamplingParams(max_new_tokens=new), **fields)
    check_request(message, VOCAB, CONTEXT, CAPACITY)


def test_the_last_sampled_token_needs_no_place_in_the_kv_cache() -> None:
    check([1] * 10, 11)
    with pytest.raises(ContextLengthError, match=r"maximum context length is 21 tokens \(the KV cache of 20 tokens"):
        check([1] * 10, 12)
    check([1] * 20, 0)
    with pytest.raises(ContextLengthError, match="prompt is too long: 21 tokens > 20 maximum"):
        check([1] * 21, 0)


@pytest.mark.parametrize(
    ("length", "new", "is_valid"), [(31, 1, True), (31, 2, False), (31, None, True), (32, 0, False)]
)
def test_a_prompt_leaves_room_for_a_token_in_the_context(length: int, new: int | None, is_valid: bool) -> None:
    message = TokenizedGenerateReq(rid="a", input_ids=[1] * length, sampling=SamplingParams(max_new_tokens=new))
    if is_valid:
        check_request(message, VOCAB, CONTEXT, 1000)
        return
    with pytest.raises(ContextLengthError, match="maximum context length is 32 tokens"):
        check_request(message, VOCAB, CONTEXT, 1000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": []}, "The prompt is empty"),
        ({"ids": [0, VOCAB]}, r"input_ids must be token ids in 0\.\.99"),
        ({"ids": [-1]}, "input_ids"),
        ({"token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
        ({"bad_words_ids": [[1], []]}, "at least one token id"),
        ({"bad_words_ids": [[1, VOCAB]]}, "bad_words_ids"),
        ({"sampling_mask_num": VOCAB + 1}, "sampling_mask_num"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
    ],
)
def test_values_that_no_step_can_compute(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        check(**({"ids": [1, VOCAB - 1]} | fields))


def test_the_largest_values_are_valid() -> None:
    check(
        [0, VOCAB - 1],
        token_ids_logprob=[VOCAB - 1],
        bad_words_ids=[[VOCAB - 1]],
        sampling_mask_num=VOCAB,
        top_logprobs_num=VOCAB,
    )
