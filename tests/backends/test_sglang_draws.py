"""The draws in SGLang's processes are those of the embedded engine for the same seeds, positions and logits.

Needs no SGLang: its settings of a batch are tensors, which these tests fill as SGLang does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_server.backends.sglang import draws
from verl_server.sampling.sampler import Sampler
from verl_server.sampling.spec import SampleSpec
from verl_server.sampling_params import TOP_K_ALL, SamplingParams

ROWS, VOCAB = 200, 300
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
}
MIXED = [*SETTINGS.values(), {"top_k": 1}, {"temperature": 0.0}]


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def seeds() -> list[int]:
    return torch.randint(0, 2**63 - 1, (ROWS,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def lengths() -> Tensor:
    """Tokens of each sequence before the draw."""
    return torch.randint(1, 5000, (ROWS,), generator=torch.Generator().manual_seed(2))


def embedded(logits: Tensor, params: list[SamplingParams], seeds: list[int], lengths: Tensor) -> list[int]:
    specs = [SampleSpec(p, seed, [1], [], [], False) for p, seed in zip(params, seeds, strict=True)]
    sampler = Sampler(VOCAB, torch.device("cpu"))
    return sampler.launch(logits.clone(), specs, lengths.numpy().astype(np.int64)).read().next_ids


def in_sglang(logits: Tensor, params: list[SamplingParams], seeds: list[int], lengths: Tensor) -> list[int]:
    """Draw as SGLang's sampler calls `sample`. A position is that of the last known token."""
    info = SimpleNamespace(
        temperatures=torch.tensor([[p.temperature or 1.0] for p in params]),  # SGLang's own normalization
        top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_ps=torch.tensor([p.top_p for p in params]),
        min_ps=torch.tensor([p.min_p for p in params]),
        need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
        need_top_p_sampling=any(p.top_p != 1.0 for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        sampling_seed=torch.tensor(seeds, dtype=torch.int64),
    )
    is_simple = not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling)
    probs = (logits / info.temperatures).softmax(-1)
    given = probs.clone()
    ids = draws.sample(None, probs, info, lengths - 1, is_simple)
    assert ids.dtype == torch.int32 and ids.shape == (len(params),)
    assert torch.equal(probs, given), "SGLang computes log-probabilities of them afterwards"
    found: list[int] = ids.tolist()
    return found


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_draws_are_those_of_the_embedded_engine(
    logits: Tensor, seeds: list[int], lengths: Tensor, settings: dict[str, Any]
) -> None:
    params = [SamplingParams.parse(settings)] * ROWS
    drawn = in_sglang(logits, params, seeds, lengths)
    assert drawn == embedded(logits, params, seeds, lengths)
    assert len(set(drawn)) > ROWS // 4
    plain = in_sglang(logits, [SamplingParams()] * ROWS, seeds, lengths)
    assert (drawn != plain) == bool(settings), "the setting changes draws here"


def test_rows_of_a_mixed_batch_are_independent(logits: Tensor, seeds: list[int], lengths: Tensor) -> None:
    logits = logits.round()  # so that the largest logits of a row are equal, of which a greedy row takes the same one
    params = [SamplingParams.parse(MIXED[i % len(MIXED)]) for i in range(ROWS)]
    drawn = in_sglang(logits, params, seeds, lengths)
    assert drawn == embedded(logits, params, seeds, lengths)
    greedy = [i for i in range(ROWS) if params[i].is_greedy]
    assert [logits[i, drawn[i]] for i in greedy] == logits.amax(-1)[greedy].tolist()
    others = in_sglang(logits, params, seeds[1:] + seeds[:1], lengths)
    assert [others[i] for i in greedy] == [drawn[i] for i in greedy], "a greedy row has no seed"


def test_a_draw_depends_on_the_seed_and_the_position(logits: Tensor, seeds: list[int], lengths: Tensor) -> None:
    params = [SamplingParams()] * ROWS
    drawn = in_sglang(logits, params, seeds, lengths)
    assert drawn == in_sglang(logits, params, seeds, lengths)
    assert drawn != in_sglang(logits, params, seeds, lengths + 1)
    assert drawn != in_sglang(logits, params, seeds[1:] + seeds[:1], lengths)


def test_the_seeds_of_the_requests_are_those_of_the_batch() -> None:
    seeds = [3, 2**63 - 1, 0]
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    )
    made = SimpleNamespace(temperatures=torch.ones(3, 1), sampling_seed=None)
    calls: list[tuple[Any, ...]] = []

    def original(*args: Any) -> Any:
        calls.append(args)
        return made

    info = draws.with_seeds(original, "class", batch, VOCAB)
    assert info is made and calls == [("class", batch, VOCAB)]
    assert info.sampling_seed.dtype == torch.int64 and info.sampling_seed.tolist() == seeds
