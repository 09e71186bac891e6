"""The adapter of a vLLM server reports where the policy's log-probabilities are."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.engine.attached.vllm_completions import _logprobs_mode, _policy_logprobs
from verl_server.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("setting", "params", "known"),
    [
        ("processed_logprobs", {"temperature": 0.7}, "same"),
        ("processed_logprobs", {"temperature": 0.7, "top_p": 0.9}, "unknown"),
        ("processed_logprobs", {"logit_bias": {"3": 1.0}}, "unknown"),
        ("processed_logprobs", {"regex": "a*"}, "unknown"),
        ("processed_logprobs", {"bad_words": ["a"]}, "unknown"),
        ("raw_logprobs", {"top_p": 0.9}, "same"),
        ("raw_logprobs", {"temperature": 0.7}, "unknown"),
        ("raw_logprobs", {"regex": "a*"}, "unknown"),
        (None, {}, "unknown"),
    ],
)
def test_only_unedited_logprobs_are_the_policys(setting: str | None, params: dict[str, Any], known: str) -> None:
    parsed = SamplingParams.parse(params)
    assert _policy_logprobs(_logprobs_mode(setting, parsed), parsed) == known
