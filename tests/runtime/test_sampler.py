"""The sampler's distribution, log-probability definition, seeds, penalties and its behaviour on NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_server.runtime.forward_batch import SampleSpec
from verl_server.runtime.sampler import Sampler, seeded_uniforms
from verl_server.sampling_params import SamplingParams

VOCAB = 50


def spec(
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    seed: int | None = None,
    stop: tuple[int, ...] = (),
    top: int = 0,
    ids: list[int] | None = None,
    **params: Any,
) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams.parse(params),
        seed=seed,
        prompt_ids=list(prompt),
        output_ids=list(output),
        stop_ids=list(stop),
        return_logprob=True,
        top_logprobs_num=top,
        token_ids_logprob=ids,
    )


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, torch.device("cpu"), random_seed=0)


def random_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 2.0 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw_counts(sampler: Sampler, logits: Tensor, draws: int = 8000, **params: Any) -> Tensor:
    batch = [spec(**params) for _ in range(1000)]
    counts = torch.zeros(VOCAB)
    for _ in range(draws // 1000):
        output = sampler(logits.expand(1000, -1).clone(), batch)
        counts += torch.bincount(torch.tensor(output.next_ids), minlength=VOCAB)
    return counts


def assert_distribution(counts: Tensor, probs: Tensor) -> None:
    """Chi-square over the classes expected at least five times, within five standard deviations."""
    assert not counts[probs == 0].any()
    expected = probs * counts.sum()
    kept = expected >= 5
    chi = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * max(freedom, 1)), (float(chi), freedom)


def reference_probs(
    logits: Tensor, temperature: float = 1.0, top_k: int = VOCAB, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The definition, written slowly: each filter cuts the unfiltered distribution, the rest is renormalized."""
    probs = (logits[0].double() / temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    kept = torch.zeros_like(probs)
    before = 0.0
    for rank, token in enumerate(order):
        if (rank == 0 or (rank < top_k and before < top_p)) and probs[token] >= min_p * probs.max():
            kept[token] = probs[token]
        before += float(probs[token])
    return kept / kept.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.7},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 3, "top_p": 1e-6},
    ],
)
def test_draws_follow_the_distribution(sampler: Sampler, params: dict[str, Any]) -> None:
    logits = random_logits()
    assert_distribution(draw_counts(sampler, logits, **params), reference_probs(logits, **params).float())


def test_seeded_draws_follow_the_distribution(sampler: Sampler) -> None:
    """Over seeds at one position, and over positions of one seed."""
    logits = random_logits()
    probs = reference_probs(logits).float()
    by_seed = sampler(logits.expand(8000, -1).clone(), [spec(seed=s) for s in range(-4000, 4000)])
    assert_distribution(torch.bincount(torch.tensor(by_seed.next_ids), minlength=VOCAB).float(), probs)
    by_position = sampler(logits.expand(4000, -1).clone(), [spec(prompt=(1,) * (n + 1), seed=7) for n in range(4000)])
    assert_distribution(torch.bincount(torch.tensor(by_position.next_ids), minlength=VOCAB).float(), probs)


def test_seeded_uniforms_cover_extreme_seeds() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 2**63], dtype=np.uint64)
    values = seeded_uniforms(seeds, np.zeros(4, dtype=np.uint64))
    assert ((values >= 0) & (values < 1)).all() and len(set(values.tolist())) == 4


def test_seeded_draw_ignores_the_batch_around_it(sampler: Sampler) -> None:
    logits = random_logits(6)
    for params in ({}, {"top_p": 0.9}, {"top_k": 4, "min_p": 0.01}):
        alone = sampler(logits[2:3].clone(), [spec(seed=11, **params)])
        around = [spec(), spec(temperature=0.0), spec(seed=11, **params), spec(top_k=20), spec(seed=3), spec(top_p=0.5)]
        assert sampler(logits.clone(), around).next_ids[2] == alone.next_ids[0]
    other = Sampler(VOCAB, torch.device("cpu"), random_seed=99)
    assert (
        other(logits[2:3].clone(), [spec(seed=11)]).next_ids == sampler(logits[2:3].clone(), [spec(seed=11)]).next_ids
    )


def test_unseeded_draws_differ_between_steps_and_repeat_between_servers(sampler: Sampler) -> None:
    logits, specs = torch.zeros(8, VOCAB), [spec() for _ in range(8)]
    first, second = (sampler(logits.clone(), specs).next_ids for _ in range(2))
    assert first != second
    assert Sampler(VOCAB, torch.device("cpu"), random_seed=0)(logits.clone(), specs).next_ids == first


def test_logprobs_are_before_the_filters_and_after_temperature(sampler: Sampler) -> None:
    logits = random_logits(4)
    specs = [spec(temperature=0.5, top_k=3), spec(temperature=0.0), spec(top_p=0.3), spec(temperature=0.7, top_k=1)]
    output = sampler(logits.clone(), specs)
    for i, temperature in enumerate((0.5, 1.0, 1.0, 0.7)):
        expected = (logits[i] / temperature).log_softmax(-1)
        assert output.logprobs[i] == pytest.approx(float(expected[output.next_ids[i]]), abs=1e-5)
    assert output.next_ids[1] == int(logits[1].argmax()) and output.next_ids[3] == int(logits[3].argmax())


def test_candidates(sampler: Sampler) -> None:
    logits = random_logits(3)
    output = sampler(logits.clone(), [spec(top=4, temperature=0.0), spec(ids=[9, 3, 9]), spec(ids=[])])
    expected = logits.log_softmax(-1)
    top = output.top_logprobs[0]
    assert top is not None and top.token_ids == expected[0].topk(4).indices.tolist()
    assert top.logprobs == pytest.approx(expected[0].topk(4).values.tolist(), abs=1e-5)
    asked = output.token_ids_logprobs[1]
    assert asked is not None and asked.token_ids == [9, 3, 9]
    assert asked.logprobs == pytest.approx(expected[1][[9, 3, 9]].tolist(), abs=1e-5)
    empty = output.token_ids_logprobs[2]
    assert empty is not None and empty.token_ids == []
    assert output.top_logprobs[1:] == [None, None] and output.token_ids_logprobs[0] is None
    wide = sampler(logits[:1].clone(), [spec(top=VOCAB + 9)]).top_logprobs[0]
    assert wide is not None and len(wide.token_ids) == VOCAB


def penalized(logits: Tensor, s: SampleSpec) -> Tensor:
    """The definition of penalties and bias, token by token."""
    logits, p = logits.clone(), s.params
    for token in range(VOCAB):
        count = s.output_ids.count(token)
        if count or token in s.prompt_ids:
            value = logits[token]
            logits[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        logits[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        logits[token] += (p.logit_bias or {}).get(str(token), 0.0)
        if token in s.stop_ids and len(s.output_ids) < p.min_new_tokens:
            logits[token] = -math.inf
    return logits


def test_penalties_over_steps_and_changing_batches(sampler: Sampler) -> None:
    """Counts grow with live `output_ids`, survive a change of the batch, and touch no other row."""
    a = spec(repetition_penalty=1.3, frequency_penalty=0.4, temperature=0.0)
    b = spec(prompt=(7, 7, 8), output=(9, 9), presence_penalty=-0.7, logit_bias={"4": 3.0, "5": -50.0}, temperature=0.0)
    c = spec(min_new_tokens=4, stop=(0, 2), temperature=0.0)
    plain = spec(temperature=0.0)
    for step, batch in enumerate([[a, plain], [a, plain], [plain, b, a], [c, a, b], [c, b], [a, b, c], [a, c]]):
        logits = random_logits(len(batch), seed=step)
        output = sampler(logits.clone(), batch)
        for i, s in enumerate(batch):
            expected = penalized(logits[i], s)
            assert output.next_ids[i] == int(expected.argmax())
            assert output.logprobs[i] == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-5)
        for s, token in zip(batch, output.next_ids, strict=True):
            s.output_ids.append(token)


def test_masked_stop_ids_have_a_finite_logprob(sampler: Sampler) -> None:
    """-inf would become null in JSON."""
    output = sampler(random_logits(), [spec(min_new_tokens=1, stop=(2,), ids=[2], top=VOCAB)])
    asked, top = output.token_ids_logprobs[0], output.top_logprobs[0]
    assert asked is not None and top is not None
    assert math.isfinite(asked.logprobs[0]) and asked.logprobs[0] < -1e30
    assert all(math.isfinite(v) for v in top.logprobs)
    assert output.next_ids[0] != 2


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1, "seed": 1}])
def test_nan_is_flagged_and_harms_nobody_else(sampler: Sampler, poison: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    healthy = logits[[0, 2]].clone()
    logits[1, 17] = poison
    output = sampler(logits, [spec(seed=1), spec(**params), spec(seed=2)])
    assert math.isnan(output.logprobs[1]) and 0 <= output.next_ids[1] < VOCAB
    expected = sampler(healthy, [spec(seed=1), spec(seed=2)])
    assert [output.next_ids[0], output.next_ids[2]] == expected.next_ids
    assert all(math.isfinite(output.logprobs[i]) for i in (0, 2))


def test_all_masked_row_is_flagged(sampler: Sampler) -> None:
    logits = random_logits(1)
    logits[0] = -math.inf
    output = sampler(logits, [spec()])
    assert math.isnan(output.logprobs[0]) and 0 <= output.next_ids[0] < VOCAB


def test_extreme_uniforms_never_draw_an_impossible_token(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the very ends of [0, 1) the draw stays on tokens of positive probability."""
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, 10:13] = 0.0
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    monkeypatch.setattr(sampler, "_uniforms", lambda params, specs: ends.copy())
    assert sampler(logits.clone(), [spec(), spec()]).next_ids == [10, 12]
    assert set(sampler(logits.clone(), [spec(top_k=2), spec(top_k=2)]).next_ids) <= {10, 11, 12}
