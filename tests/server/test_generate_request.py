"""Bodies that `/generate` accepts, the order in which they are expanded, and the message of each refusal."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server import ServerArgs
from verl_server.errors import BadRequestError
from verl_server.models.tiny import byte_tokenizer
from verl_server.server.generate_request import GenerateReqInput, Samples, read_prompts
from verl_server.server.limits import Limits
from verl_server.server.text.text_tools import ModelBounds, TextTools


def expand(body: dict[str, Any]) -> list[Samples]:
    """Expand the request of each prompt."""
    obj = GenerateReqInput.parse(body)
    limits = Limits.of(ServerArgs(model_path="model"), context_length=512)
    return list(obj.expand(len(obj.prompts()), obj.is_single, limits))


def samples(**body: Any) -> list[Samples]:
    return expand(body)


def test_batch_and_n_expand_prompt_by_prompt() -> None:
    out = samples(input_ids=[[1], [2]], sampling_params={"n": 3}, rid=["a", "b"])
    assert [s.rids for s in out] == [["a_0", "a_1", "a_2"], ["b_0", "b_1", "b_2"]]


def test_sampling_seed_counts_up_over_n() -> None:
    (out,) = samples(text="x", sampling_params={"n": 3, "sampling_seed": 2**63 - 2})
    each = [out.sampling_of(k) for k in range(3)]
    assert [s.sampling_seed for s in each] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert all(s.n == 1 for s in each)


def test_null_is_the_default() -> None:
    (out,) = samples(text="x", sampling_params=None, return_logprob=None, image_data=None, rid=None, stream=None)
    assert (out.return_logprob, out.logprob_start_len, out.sampling.max_new_tokens) == (False, -1, 128)


def test_string_rid_of_a_batch_is_numbered() -> None:
    assert [s.rids for s in samples(text=["a", "b"], rid="r")] == [["r_0"], ["r_1"]]
    assert [s.rids for s in samples(text="a", rid="r")] == [["r"]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided"),
        ({"text": "a", "input_ids": [1]}, "Both were given"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [[1], []]}, "prompt 1"),
        ({"input_ids": [1, [2]]}, "mixes"),
        ({"input_ids": [True]}, "`int | array`, got `bool` - at `input_ids[0]`"),
        ({"input_ids": [1.5]}, "got `float`"),
        ({"input_ids": "1,2"}, "input_ids"),
        ({"text": 5}, "text"),
        ({"text": []}, "text cannot be an empty list"),
        ({"text": "a", "stream": 2}, "stream"),
        ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
        ({"text": "a", "top_logprobs_num": True}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": "hot"}, "sampling_params must be an object"),
        ({"text": "a", "sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be >= 0"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "unknown field `max_tokens`, expected one of"),
        ({"text": "a", "sampling_params": {"json_schema": "{}", "regex": "a"}}, "json_schema and regex: set at most"),
        ({"text": "a", "sampling_params": {"json_schema": {}}}, "json_schema"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "same for all prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request IDs detected within the request: ['x']"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid has 1 entries"),
        ({"text": ["a", "b"], "return_logprob": [True, False], "sampling_params": {"n": 2}}, "must not be a list"),
        ({"text": "a", "session_id": "x" * 129}, "session_id has 129 characters; this server accepts at most 128"),
        ({"text": ["a", "b"], "conversation_id": [None, "x" * 200]}, "conversation_id has 200 characters"),
        ({"text": ["a", "b"], "session_id": ["x"]}, "session_id has 1 entries for 2 prompt(s)"),
        ({"text": "a", "session_id": 5}, "`str | array | null`, got `int` - at `session_id`"),
        ({"text": "a", "session_id": [{}]}, "session_id"),
        ({"text": "a", "session_id": "s", "session_params": {"id": "s"}}, "cannot both be set"),
        ({"text": "a", "lora_path": "adapter"}, "`lora_path` is not supported"),
        ({"text": "a", "input_embeds": [[0.5]]}, "`input_embeds` is not supported"),
        ({"text": "a", "image_data": ["x.png"]}, "`image_data` is not supported"),
        ({"text": "a", "return_hidden_states": True}, "`return_hidden_states` is not supported"),
        ({"text": "a", "return_routed_experts": True}, "`return_routed_experts` is not supported"),
        ({"text": "a", "custom_logit_processor": "x"}, "`custom_logit_processor` is not supported"),
        ({"text": "a", "routed_dp_rank": 1}, "`routed_dp_rank` is not supported: this server has one"),
        ({"text": "a", "data_parallel_rank": -1}, "`data_parallel_rank` is not supported"),
        ({"text": "a", "return_sampling_mask": True}, "return_sampling_mask needs greedy sampling or top_k of at most"),
        ({"text": "a", "return_sampling_mask": True, "sampling_params": {"top_k": 300}}, "top_k is 300"),
        ({"text": "a", "return_sampling_mask": True, "columnar": True}, "columnar replies hold no sampling masks"),
        ({"text": "a", "sampling_logprobs_mode": "support"}, "needs return_sampling_mask=true"),
        ({"text": "a", "return_sampling_mask": True, "sampling_logprobs_mode": "all"}, "sampling_logprobs_mode"),
        ({"text": "a", "priority": 1.5}, "priority"),
        ({"text": "a", "priority": 2**63}, "priority must be a 64-bit integer"),
        ({"text": "a", "extra_key": ["x", "y"]}, "extra_key has 2 entries for 1 prompt(s)"),
        ({"text": "a", "cache_salt": "s" * 1025}, "cache_salt has 1025 characters"),
        ({"text": "a", "cache_salt": 5}, "cache_salt"),
        ({"text": "a", "sampling_params": {"logprobs_mode": "processed"}}, "logprobs_mode"),
        ({"text": "a", "sampling_params": {"allowed_token_ids": []}}, "allowed_token_ids must be null or at least one"),
        ({"text": "a", "sampling_params": {"allowed_token_ids": [1] * 20000}}, "setting max_allowed_token_ids"),
        ({"text": "a", "sampling_params": {"bad_words": ["ok", " "]}}, "bad_words must be words that are not empty"),
        ({"text": "a", "sampling_params": {"bad_words": ["\ud800"]}}, "a lone surrogate"),
        ({"text": "a", "sampling_params": {"bad_words": ["a"] * 257}}, "setting max_bad_words)"),
        ({"text": "a", "sampling_params": {"bad_words": ["a" * 5000]}}, "setting max_bad_words_length)"),
        ({"text": "a", "sampling_params": {"stop_regex": ["a"] * 33}}, "at most 32 patterns"),
        ({"text": "a", "sampling_params": {"stop_regex": "é" * 129}}, "at most 256 bytes each, not 'a pattern of 258"),
        ({"text": "a", "sampling_params": {"stop_regex": [""]}}, "patterns that are not empty"),
    ],
)
def test_refusals_name_the_fault(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        expand(body)
    assert says in str(caught.value)


def test_unset_values_of_unsupported_fields_pass() -> None:
    assert samples(text="a", image_data=[None], return_hidden_states=False, lora_path="", session_params=None)


def test_a_namespace_is_made_of_both_parts() -> None:
    """Two pairs never have one namespace, and a value that is not set adds nothing."""
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("1:", "a"), ("", "1:a"), ("1", ":a")]
    found = [samples(text="x", extra_key=key, cache_salt=salt)[0].namespace for key, salt in pairs]
    assert found[0] == "" and len(set(found)) == len(pairs)
    assert samples(text="x", cache_salt=None)[0].namespace == ""
    batch = samples(text=["x", "y", "z"], extra_key=["a", None, "c"], cache_salt="s", sampling_params={"n": 2})
    alone = [samples(text="x", extra_key=key, cache_salt="s")[0].namespace for key in ("a", None, "c")]
    assert [s.namespace for s in batch] == alone


def test_rank_0_may_be_named() -> None:
    assert samples(text="a", routed_dp_rank=0, data_parallel_rank=None, priority=-3)


@pytest.mark.parametrize(
    ("keep", "new", "length", "kept"),
    [(3, 8, 10, 3), (20, 8, 10, 10), (-1, 100, 500, 156), (-1, None, 500, 255), (-1, 0, 500, 255), (None, 8, 10, 10)],
)
def test_truncated_prompts_keep_their_end(keep: int | None, new: int | None, length: int, kept: int) -> None:
    body = {"input_ids": [list(range(length)), [7]], "truncate_prompt_tokens": keep}
    request = GenerateReqInput.parse(body | {"sampling_params": {"max_new_tokens": new}})
    bounds = ModelBounds(context_length=256, vocab_size=1000, max_req_input_len=255)
    limits = Limits.of(ServerArgs(model_path="model"), context_length=256)
    tools = TextTools(byte_tokenizer(), limits, bounds)  # type: ignore[arg-type]
    assert read_prompts(tools, request).prompts == [list(range(length))[-kept:], [7]]


@pytest.mark.parametrize("keep", [0, -2])
def test_a_truncation_to_nothing_is_refused(keep: int) -> None:
    request = GenerateReqInput.parse({"input_ids": [1], "truncate_prompt_tokens": keep})
    with pytest.raises(BadRequestError, match="truncate_prompt_tokens must be -1 or at least 1"):
        request.kept_tokens(1, ModelBounds(context_length=256, vocab_size=1000))
