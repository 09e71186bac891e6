"""Sampling under masks: what is drawn, and over which tokens log-probabilities are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from verl_server.sampling.sampler import Sampler
from verl_server.sampling.spec import ForwardOutput, SampleSpec, TokenMasks
from verl_server.sampling_params import SamplingParams

VOCAB = 50


def spec(stop: tuple[int, ...] = (), top: int = 0, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams.parse(params), 7, [1, 2], [], list(stop), True, top)


def masks(allowed: dict[int, list[int]]) -> TokenMasks:
    """Return masks that allow `allowed[row]` in each of the rows."""
    bits = np.zeros((len(allowed), 64), dtype=bool)
    for place, tokens in enumerate(allowed.values()):
        bits[place, tokens] = True
    return TokenMasks(list(allowed), torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)))


def sample(specs: list[SampleSpec], allowed: dict[int, list[int]], dtype: torch.dtype = torch.float32) -> ForwardOutput:
    positions = np.full(len(specs), 2, dtype=np.int64)
    logits = LOGITS[: len(specs)].clone().to(dtype)
    return Sampler(VOCAB, torch.device("cpu")).launch(logits, specs, positions, masks(allowed)).read()


LOGITS = 2.0 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"3": 100.0}},
        {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1.0},
    ],
)
def test_a_forbidden_token_has_no_part_in_draw_and_log_probability(params: dict[str, Any]) -> None:
    """Row 1 is free; rows 0 and 2 are constrained. The reference samples from the allowed logits alone."""
    allowed = {2: [4, 9, 31, 32, 49], 0: [0, 5, 48]}
    specs = [spec(**params) for _ in range(3)]
    output = sample(specs, allowed)
    free = Sampler(VOCAB, torch.device("cpu")).launch(LOGITS[:3].clone(), specs, np.full(3, 2, dtype=np.int64)).read()
    assert (output.next_ids[1], output.logprobs[1]) == (free.next_ids[1], free.logprobs[1])
    for row, tokens in allowed.items():
        assert output.next_ids[row] in tokens
        only = LOGITS[row].clone()
        only[[token for token in range(VOCAB) if token not in tokens]] = -torch.inf
        if "repetition_penalty" not in params and "presence_penalty" not in params:
            scaled = only / (params.get("temperature") or 1.0)
            expected = scaled.log_softmax(-1)[output.next_ids[row]].item()
            assert output.logprobs[row] == pytest.approx(expected, abs=1e-5)


def test_a_row_with_one_allowed_token_has_probability_one() -> None:
    output = sample([spec(), spec(temperature=0.0)], {0: [17], 1: [3]}, torch.bfloat16)
    assert output.next_ids == [17, 3] and output.logprobs == [0.0, 0.0]


def test_the_top_list_holds_allowed_tokens_first() -> None:
    output = sample([spec(top=4)], {0: [8, 33]})
    top = output.top_logprobs[0]
    assert top is not None and set(top.token_ids[:2]) == {8, 33} and max(top.logprobs[2:]) < -1e30


def test_a_row_without_an_allowed_token_has_no_log_probability() -> None:
    """min_new_tokens forbids the only token that the mask allows."""
    output = sample([spec(stop=(6,), min_new_tokens=3), spec()], {0: [6], 1: []})
    assert not any(map(math.isfinite, output.logprobs))
    assert all(0 <= token < VOCAB for token in output.next_ids)


def test_the_draw_is_the_one_without_a_mask_if_its_token_is_allowed() -> None:
    """A mask that allows everything changes nothing."""
    specs = [spec(temperature=0.8, top_p=0.9)]
    everything = sample(specs, {0: list(range(VOCAB))})
    free = Sampler(VOCAB, torch.device("cpu")).launch(LOGITS[:1].clone(), specs, np.full(1, 2, dtype=np.int64)).read()
    assert everything == free
