"""The log-probability of the policy beside that of edited rows, and whether masks left a choice.

The reference is plain fp32: log-softmax(model's logits / temperature), without mask, penalty or bias.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from verl_server.sampling.distribution import SamplingOps
from verl_server.sampling.sampler import Sampler
from verl_server.sampling.spec import ForwardOutput, SampleSpec, TokenMasks
from verl_server.sampling_params import SamplingParams

VOCAB = 50
LOGITS = 2.0 * torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(1))
EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {"3": 50.0, "7": -50.0}},
    {"min_new_tokens": 9, "stop": (int(LOGITS[0].argmax()),)},
    {"allowed_token_ids": [3, 4, 5]},
    {"words": [[3], [1, 4]]},
    {"grammar": [2, 8, 30]},
    {"grammar": [2, 8, 30], "logit_bias": {"8": 3.0}, "repetition_penalty": 1.3, "top_p": 0.6},
]


@pytest.fixture(
    params=[
        "torch",
        "cpp",
        pytest.param(
            "triton",
            marks=[
                pytest.mark.exhaustive,  # interpreted kernels are slow
                pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
            ],
        ),
    ]
)
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    if request.param == "triton":
        pytest.importorskip("triton")
        from verl_server.sampling.fused import FusedOps

        return FusedOps()
    return SamplingOps() if request.param == "torch" else SamplingOps(request.getfixturevalue("cpu_kernels").choose)


def spec(
    seed: int = 0,
    stop: tuple[int, ...] = (),
    words: list[list[int]] | None = None,
    grammar: list[int] | None = None,
    return_logprob: bool = True,
    **params: Any,
) -> SampleSpec:
    made = SamplingParams.parse({"temperature": 0.7, **params})
    words, has_grammar = words or [], grammar is not None
    return SampleSpec(
        made, seed, [1, 3], [3, 1], list(stop), return_logprob, bad_words_ids=words, has_grammar=has_grammar
    )


def masks(settings: list[dict[str, Any]]) -> TokenMasks | None:
    allowed = {row: s["grammar"] for row, s in enumerate(settings) if "grammar" in s}
    bits = np.zeros((len(allowed), 64), dtype=bool)
    for place, tokens in enumerate(allowed.values()):
        bits[place, tokens] = True
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    return TokenMasks(list(allowed), words) if allowed else None


def sample(
    ops: SamplingOps, settings: list[dict[str, Any]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> ForwardOutput:
    specs = [spec(seed=seed, **s) for s in settings]
    positions = np.full(len(specs), 4, dtype=np.int64)
    logits = LOGITS[: len(specs)].to(dtype)
    return Sampler(VOCAB, torch.device("cpu"), ops).launch(logits.clone(), specs, positions, masks(settings)).read()


def policy(row: int, token: int, temperature: float = 0.7) -> float:
    return float((LOGITS[row] / temperature).log_softmax(-1)[token])


@pytest.mark.parametrize("settings", EDITS)
def test_an_edited_row_has_the_logprob_of_the_policy(ops: SamplingOps, settings: dict[str, Any]) -> None:
    """Alone, and in a batch with plain rows."""
    for batch, row in (([settings], 0), ([{}, settings, {}], 1)):
        output = sample(ops, batch)
        assert list(output.policy_logprobs) == [row]
        assert output.policy_logprobs[row] == pytest.approx(policy(row, output.next_ids[row]), rel=1e-5, abs=1e-5)


def test_all_edits_in_one_batch(ops: SamplingOps) -> None:
    output = sample(ops, [*EDITS, {}])
    assert list(output.policy_logprobs) == list(range(len(EDITS)))
    for row, value in output.policy_logprobs.items():
        assert value == pytest.approx(policy(row, output.next_ids[row]), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(ops: SamplingOps, dtype: torch.dtype) -> None:
    output = sample(ops, EDITS, dtype)
    for row, value in output.policy_logprobs.items():
        expected = (LOGITS[row].to(dtype).float() / 0.7).log_softmax(-1)[output.next_ids[row]]
        assert value == pytest.approx(float(expected), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "choice"),
    [
        ({"grammar": [30]}, False),
        ({"grammar": [30, 31]}, True),
        ({"grammar": [30, 31], "allowed_token_ids": [31, 40]}, False),
        ({"allowed_token_ids": [6]}, False),
        ({"allowed_token_ids": [6, 7]}, True),
        ({"allowed_token_ids": [6, 7], "words": [[7]]}, False),
        ({"allowed_token_ids": [6, 3], "words": [[1, 3]]}, False),
        ({"allowed_token_ids": [6, 7], "min_new_tokens": 9, "stop": (7,)}, False),
        ({"allowed_token_ids": [6, 7], "min_new_tokens": 1, "stop": (7,)}, True),
        ({"grammar": [30, 31], "logit_bias": {"30": 90.0}, "top_k": 1}, True),
    ],
)
def test_the_choice_that_masks_leave(ops: SamplingOps, settings: dict[str, Any], choice: bool) -> None:
    """Filters and biases leave a choice: they change probabilities, and say so in the request."""
    output = sample(ops, [{}, settings, {"logit_bias": {"3": 1.0}}])
    assert output.has_choice == {1: choice}
    assert choice or output.logprobs[1] == 0.0
    assert output.policy_logprobs[1] == pytest.approx(policy(1, output.next_ids[1]), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_other_modes_have_the_logprob_of_the_policy_beside_theirs(ops: SamplingOps, temperature: float) -> None:
    settings = [
        {"logprobs_mode": "raw"},
        {"logprobs_mode": "sampling", "top_p": 0.3},
        {"logprobs_mode": "sampling"},
    ]
    output = sample(ops, [{"temperature": temperature, **s} for s in settings])
    assert list(output.policy_logprobs) == ([0, 1] if temperature else [1, 2])
    for row, value in output.policy_logprobs.items():
        assert value == pytest.approx(policy(row, output.next_ids[row], temperature or 1.0), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_rows_whose_logprob_is_the_policys_have_no_second_one(ops: SamplingOps, settings: dict[str, Any]) -> None:
    output = sample(ops, [settings])
    assert not output.policy_logprobs and not output.has_choice
    temperature = settings.get("temperature", 0.7) or 1.0
    assert output.logprobs[0] == pytest.approx(policy(0, output.next_ids[0], temperature), rel=1e-5, abs=1e-5)


def test_nothing_is_computed_without_log_probabilities(ops: SamplingOps) -> None:
    output = sample(ops, [s | {"return_logprob": False} for s in EDITS])
    assert not output.policy_logprobs and not output.has_choice


def test_draws_and_reported_logprobs_are_the_same_with_and_without(ops: SamplingOps) -> None:
    for seed in range(8):
        beside = sample(ops, EDITS, seed=seed)
        alone = sample(ops, [s | {"return_logprob": False} for s in EDITS], seed=seed)
        assert (beside.next_ids, beside.logprobs) == (alone.next_ids, alone.logprobs)
