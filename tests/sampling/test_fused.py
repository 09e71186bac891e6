"""The kernels of the sampler keep, rank and count what the definitions in PyTorch do, also for odd rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.sampling.test_sampler import spec
from verl_server.kernels.draw import LOWEST
from verl_server.sampling.distribution import SamplingOps
from verl_server.sampling.filters import Filters
from verl_server.sampling.fused import FusedOps

VOCAB = 900
FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.95},
    {"top_p": 0.05},
    {"top_p": 0.999999},
    {"top_k": 1, "top_p": 0.5},
    {"top_k": 20},
    {"top_k": VOCAB - 1},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 0.05},
    {"min_p": 0.9, "top_k": 5, "top_p": 0.3},
    {"temperature": 0.1, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.9, "top_k": 700},
    {"temperature": 0.02, "top_k": 20},
    {"temperature": 0.02, "top_k": 20, "top_p": 0.99999},
    {},
]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def masked() -> Tensor:
    logits = random(VOCAB)
    logits[7:] = -torch.inf
    return logits


ROWS = {
    "normal": 2 * random(VOCAB),
    "flat": torch.full((VOCAB,), -3.0),
    "two values": torch.where(random(VOCAB) > 1, 2.0, 1.0),
    "a peak": torch.cat([torch.tensor([40.0]), random(VOCAB - 1)]),
    "a wide range": 300 * random(VOCAB),
    "few allowed": masked(),
    "one allowed": torch.full((VOCAB,), -torch.inf).index_fill(0, torch.tensor([VOCAB - 1]), 1.0),
    "neighbors": 1.0 + torch.arange(VOCAB) * 2.0**-23,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_filters_keep_the_tokens_that_the_definition_keeps(row: str, dtype: torch.dtype, device: torch.device) -> None:
    specs = [spec(**params) for params in FILTERS]
    logits = ROWS[row].to(dtype).expand(len(specs), -1).contiguous().to(device)
    scales = torch.tensor([1 / s.params.temperature for s in specs], device=device)
    filters = Filters.of(specs, VOCAB, device)
    every = torch.arange(VOCAB, device=device).expand(len(specs), -1)
    kept = [
        ops.distribution(logits, None, scales).filtered(filters).of(every) > LOWEST
        for ops in (SamplingOps(), FusedOps())
    ]
    probs = (logits.double() * scales.unsqueeze(1)).softmax(-1)
    for i, params in enumerate(FILTERS):
        different = kept[0][i] != kept[1][i]
        # A token may be kept by one and not by the other where rounding decides.
        assert float(probs[i][different].sum()) < 1e-5, (params, kept[0][i].sum(), kept[1][i].sum())
        assert not (different & (probs[i] < 1e-30)).any(), params


@pytest.mark.parametrize("num", [1, 5, 32])
def test_the_most_likely_tokens(num: int, device: torch.device) -> None:
    logits = torch.stack([ROWS[name] for name in ("normal", "a wide range", "few allowed", "a peak")]).to(device)
    index, scales = torch.tensor([3, 0, 2, 1, 0], device=device), torch.linspace(0.5, 2, 5, device=device)
    ours, definition = (ops.distribution(logits, index, scales) for ops in (FusedOps(), SamplingOps()))
    (values, ids), (expected, expected_ids) = ours.top(num), definition.top(num)
    rows = torch.arange(5, device=device)
    assert torch.equal(ours.at(rows, ids[:, 0]), values[:, 0])
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(values, ours.of(ids)), "a token has one log-probability, bit for bit"
    possible = expected > LOWEST
    assert torch.equal(ids[possible], expected_ids[possible])
    assert all(len(set(row)) == num and max(row) < VOCAB for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_and_logprobs_of_prompt_tokens(dtype: torch.dtype, device: torch.device) -> None:
    """More rows than one program takes, with gaps between them, and targets that cannot be drawn."""
    rows = [ROWS[name] for name in ("normal", "two values", "flat", "a wide range", "few allowed")] * 30
    logits = torch.cat([torch.stack(rows), torch.full((150, 12), 1e4)], dim=1).to(dtype).to(device)[:, :VOCAB]
    targets = torch.arange(150, device=device) * 7 % VOCAB
    _check_scores(logits, targets)


def _check_scores(logits: Tensor, targets: Tensor) -> None:
    (ours, logprobs, ranks), (_, expected, expected_ranks) = (
        ops.score(logits, targets) for ops in (FusedOps(), SamplingOps())
    )
    assert ranks.tolist() == expected_ranks.tolist() and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(logprobs, ours.of(targets[:, None]).squeeze(1)), "a token has one log-probability, bit for bit"


@pytest.mark.cuda
def test_scores_of_a_large_vocabulary() -> None:
    logits = (3 * torch.randn(300, 151_936, device="cuda")).bfloat16()
    _check_scores(logits, torch.randint(0, 151_936, (300,), device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_a_large_vocabulary_in_each_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """The last tile of blocks is not full."""
    logits = (3 * random(2, 151_936)).to(dtype).to(device)
    _check_scores(logits, torch.tensor([0, 151_935], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_rows_without_a_distribution(dtype: torch.dtype, device: torch.device) -> None:
    """NaN, +inf and only -inf, at the target and elsewhere, are what PyTorch makes of them, and harm no other row."""
    logits = random(9, VOCAB)
    logits[1, 5], logits[2, 700] = torch.nan, torch.nan
    logits[3, 5], logits[4, 700] = torch.inf, torch.inf
    logits[5], logits[6], logits[6, 5] = -torch.inf, torch.nan, 0.0
    logits[7, 5] = -torch.inf
    logits, targets = logits.to(dtype).to(device), torch.full((9,), 5, device=device)
    (_, found, ranks), (_, expected, expected_ranks) = (
        ops.score(logits, targets) for ops in (FusedOps(), SamplingOps())
    )
    assert ranks.tolist() == expected_ranks.tolist()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert found.isnan().tolist() == [False, True, True, True, True, True, True, False, False]
    assert found[7] == LOWEST
