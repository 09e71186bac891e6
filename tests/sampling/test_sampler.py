"""The sampler: its distribution, log-probabilities, seeds and penalties, and logits that are NaN."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_server.kernels import draw
from verl_server.sampling.distribution import SamplingOps
from verl_server.sampling.filters import Filters
from verl_server.sampling.logprobs import PromptCandidates
from verl_server.sampling.sampler import Sampler
from verl_server.sampling.spec import NOTHING_ALLOWED, ForwardOutput, SampleSpec
from verl_server.sampling_params import SamplingParams

VOCAB = 50


def spec(
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    seed: int = 0,
    stop: tuple[int, ...] = (),
    top: int = 0,
    ids: list[int] | None = None,
    words: list[list[int]] | None = None,
    mask: int = 0,
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
        sampling_mask_num=mask,
        bad_words_ids=words or [],
    )


@pytest.fixture(
    params=[
        "torch",
        "cpp",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
        ),
    ]
)
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    if request.param == "triton":
        pytest.importorskip("triton")
        from verl_server.sampling.fused import FusedOps

        return FusedOps()
    return SamplingOps() if request.param == "torch" else SamplingOps(request.getfixturevalue("cpu_kernels").choose)


@pytest.fixture
def sampler(ops: SamplingOps) -> Sampler:
    return Sampler(VOCAB, torch.device("cpu"), ops)


@pytest.fixture(params=["torch", "cpp"])
def fast_sampler(request: pytest.FixtureRequest) -> Sampler:
    """A sampler for thousands of draws, for which the interpreter of kernels is too slow."""
    choose = draw.choose if request.param == "torch" else request.getfixturevalue("cpu_kernels").choose
    return Sampler(VOCAB, torch.device("cpu"), SamplingOps(choose))


def sample(sampler: Sampler, logits: Tensor, specs: list[SampleSpec]) -> ForwardOutput:
    """Sample one step, in which each token follows the request's prompt and output. The logits are not changed."""
    positions = np.array([len(s.prompt_ids) + len(s.output_ids) for s in specs], dtype=np.int64)
    return sampler.launch(logits.clone(), specs, positions).read()


def random_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 2.0 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw_counts(sampler: Sampler, logits: Tensor, draws: int = 8000, **params: Any) -> Tensor:
    batch = [spec(seed=seed, **params) for seed in range(1000)]
    counts = torch.zeros(VOCAB)
    for position in range(draws // 1000):
        positions = np.full(1000, position, dtype=np.int64)
        sampled = sampler.launch(logits.expand(1000, -1).clone(), batch, positions)
        counts += torch.bincount(sampled.ids, minlength=VOCAB)
    return counts


def assert_distribution(counts: Tensor, probs: Tensor) -> None:
    """Assert that a chi-square over classes expected at least five times is within five standard deviations."""
    assert not counts[probs == 0].any()
    expected = probs * counts.sum()
    kept = expected >= 5
    chi = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * max(freedom, 1)), (float(chi), freedom)


def reference_probs(
    logits: Tensor, temperature: float = 1.0, top_k: int = VOCAB, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return the distribution by its definition: each filter cuts the unfiltered one, the rest is renormalized."""
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
def test_draws_follow_the_distribution(fast_sampler: Sampler, params: dict[str, Any]) -> None:
    logits = random_logits()
    assert_distribution(draw_counts(fast_sampler, logits, **params), reference_probs(logits, **params).float())


def test_draws_follow_the_distribution_over_seeds_and_over_positions(fast_sampler: Sampler) -> None:
    logits = random_logits()
    probs = reference_probs(logits).float()
    for seeds in (range(-4000, 4000), range(2**63 - 4000, 2**63), range(0, 2**62, 2**50)):
        by_seed = sample(fast_sampler, logits.expand(len(seeds), -1), [spec(seed=s) for s in seeds])
        assert_distribution(torch.bincount(torch.tensor(by_seed.next_ids), minlength=VOCAB).float(), probs)
    specs = [spec(seed=7) for _ in range(4000)]
    by_position = fast_sampler.launch(logits.expand(4000, -1).clone(), specs, np.arange(4000))
    assert_distribution(torch.bincount(by_position.ids, minlength=VOCAB).float(), probs)


def test_a_draw_ignores_the_batch_around_it_and_what_ran_before(sampler: Sampler) -> None:
    logits = random_logits(6)
    for params in ({}, {"top_p": 0.9}, {"top_k": 4, "min_p": 0.01}, {"presence_penalty": 0.5}):
        alone = sample(sampler, logits[2:3], [spec(seed=11, **params)])
        around = [
            spec(),
            spec(temperature=0.0),
            spec(seed=11, **params),
            spec(top_k=20),
            spec(seed=3, top=2),
            spec(top_p=0.5, presence_penalty=1.0),
        ]
        together = sample(sampler, logits, around)
        assert together.next_ids[2] == alone.next_ids[0]
        assert together.logprobs[2] == pytest.approx(alone.logprobs[0], abs=1e-6)
        again = Sampler(VOCAB, torch.device("cpu"))
        assert sample(again, logits[2:3], [spec(seed=11, **params)]).next_ids == alone.next_ids


def filtered(ops: SamplingOps, logits: Tensor, filters: Filters) -> Tensor:
    """Return `logits` [n, vocab] with -inf for the tokens that the filters remove, as seen in log-probabilities."""
    n, vocab = logits.shape
    rows = ops.distribution(logits, None, torch.ones(n)).filtered(filters)
    logprobs = rows.of(torch.arange(vocab).expand(n, -1))
    return logits.masked_fill(logprobs <= draw.LOWEST, -torch.inf)


def test_each_row_has_its_own_filters(ops: SamplingOps) -> None:
    """The rows of a batch are filtered together, up to the widest top-k."""
    logits = random_logits(6)
    settings: list[dict[str, Any]] = [{"top_k": 2}, {}, {"top_k": 7}, {"min_p": 0.2}, {"top_k": 3, "min_p": 0.9}, {}]
    settings[5] = {"top_k": 1}  # greedy: not filtered
    filters = Filters.of([spec(**params) for params in settings], VOCAB, torch.device("cpu"))
    kept = filtered(ops, logits, filters).isfinite().sum(-1).tolist()
    likely = (logits[3] >= logits[3].max() + math.log(0.2)).sum()
    assert kept == [2, VOCAB, 7, int(likely), 1, VOCAB]


def test_equally_likely_tokens_stay_or_go_together(sampler: Sampler) -> None:
    """Equally likely tokens are all kept or all cut, because their order after a sort depends on device and batch."""
    logits = torch.full((24, VOCAB), -3.0)
    logits[:, [5, 11, 17]], logits[:, 30] = 1.0, 2.0
    for params in ({"top_k": 2}, {"top_k": 4}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.6}):
        drawn = sample(sampler, logits, [spec(seed=s, **params) for s in range(24)]).next_ids
        assert set(drawn) == {5, 11, 17, 30}, params


@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_top_p_of_a_large_vocabulary(ops: SamplingOps, scale: float) -> None:
    """Cases in which a few candidates hold enough probability, and cases in which all tokens must be sorted."""
    logits = scale * torch.randn(3, 5000, generator=torch.Generator().manual_seed(2))
    filters = Filters.of([spec(top_p=p) for p in (0.3, 0.9, 0.99)], 5000, torch.device("cpu"))
    kept = filtered(ops, logits, filters).isfinite()
    for row, top_p in enumerate((0.3, 0.9, 0.99)):
        probs = logits[row].double().softmax(-1)
        before = (probs > probs.unsqueeze(1)).double() @ probs
        assert ((before < top_p) == kept[row]).float().mean() > 0.999  # rounding may decide at the boundary
        assert (scale < 1) == (int(kept.sum()) > 1024)


def test_settings_that_change_nothing_draw_the_same_tokens(sampler: Sampler) -> None:
    """Filters that keep every token, a zero bias and reported candidates leave the noise as it is."""
    logits = random_logits(4)
    plain = sample(sampler, logits, [spec(seed=s) for s in range(4)]).next_ids
    settings: list[dict[str, Any]] = [
        {"top_k": VOCAB},
        {"top_p": 1 - 1e-12},
        {"min_p": 1e-30},
        {"logit_bias": {"3": 0.0}},
        {"top": 3},
        {"ids": [1]},
        {"min_new_tokens": 1},
    ]
    for same in settings:
        assert sample(sampler, logits, [spec(seed=s, **same) for s in range(4)]).next_ids == plain
        mixed = [spec(seed=s, **(same if s % 2 else {})) for s in range(4)]
        assert sample(sampler, logits, mixed).next_ids == plain


def test_logprobs_are_before_the_filters_and_after_temperature(sampler: Sampler) -> None:
    logits = random_logits(4)
    specs = [spec(temperature=0.5, top_k=3), spec(temperature=0.0), spec(top_p=0.3), spec(temperature=0.7, top_k=1)]
    output = sample(sampler, logits, specs)
    for i, temperature in enumerate((0.5, 1.0, 1.0, 0.7)):
        expected = (logits[i] / temperature).log_softmax(-1)
        assert output.logprobs[i] == pytest.approx(float(expected[output.next_ids[i]]), abs=1e-5)
    assert output.next_ids[1] == int(logits[1].argmax()) and output.next_ids[3] == int(logits[3].argmax())


def test_candidates(sampler: Sampler) -> None:
    logits = random_logits(3)
    output = sample(sampler, logits, [spec(top=4, temperature=0.0), spec(ids=[9, 3, 9]), spec(ids=[])])
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
    wide = sample(sampler, logits[:1], [spec(top=VOCAB + 9)]).top_logprobs[0]
    assert wide is not None and len(wide.token_ids) == VOCAB


def penalized(logits: Tensor, s: SampleSpec) -> Tensor:
    """Apply penalties and bias by their definition, token by token."""
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
    """Counts grow with `output_ids` between steps, survive a change of the batch, and touch no other row."""
    a = spec(repetition_penalty=1.3, frequency_penalty=0.4, temperature=0.0)
    b = spec(prompt=(7, 7, 8), output=(9, 9), presence_penalty=-0.7, logit_bias={"4": 3.0, "5": -50.0}, temperature=0.0)
    c = spec(min_new_tokens=4, stop=(0, 2), temperature=0.0)
    plain = spec(temperature=0.0)
    for step, batch in enumerate([[a, plain], [a, plain], [plain, b, a], [c, a, b], [c, b], [a, b, c], [a, c]]):
        logits = random_logits(len(batch), seed=step)
        output = sample(sampler, logits, batch)
        for i, s in enumerate(batch):
            expected = penalized(logits[i], s)
            assert output.next_ids[i] == int(expected.argmax())
            assert output.logprobs[i] == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-5)
        for s, token in zip(batch, output.next_ids, strict=True):
            s.output_ids.append(token)


def test_penalties_count_each_token_once_after_a_launch_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed launch all tokens are counted again, because the launch may have marked tokens too early."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    s = spec(output=(3,), frequency_penalty=0.7, repetition_penalty=1.3)
    logits = random_logits()
    sample(sampler, logits.clone(), [s])
    s.output_ids.append(4)
    with monkeypatch.context() as failing:
        failing.setattr(Tensor, "index_add_", no_memory)
        with pytest.raises(MemoryError):
            sample(sampler, logits.clone(), [s])
    sampler.forget()
    again = sample(sampler, logits.clone(), [s])
    expected = sample(Sampler(VOCAB, torch.device("cpu")), logits.clone(), [s])
    assert again.next_ids == expected.next_ids and again.logprobs == expected.logprobs


@pytest.mark.parametrize("seen", [True, False])
def test_penalties_count_tokens_that_the_host_has_not_seen(sampler: Sampler, seen: bool) -> None:
    """While steps overlap, a token is sampled before the one before it is in `output_ids`.

    A step may also leave the newest token of a row out (`left_out`), compute fewer rows, or take new ones.
    """
    a = spec(presence_penalty=0.9, frequency_penalty=0.5, temperature=0.0)
    b = spec(prompt=(6, 7), output=(4, 4), repetition_penalty=1.6, temperature=0.0)
    outputs = {id(s): list(s.output_ids) for s in (a, b)}
    for step, (batch, dropped) in enumerate(
        [([a], a), ([a], None), ([b, a], b), ([b, a], None), ([b], None), ([a], None)]
    ):
        logits = random_logits(len(batch), seed=step)
        lens = [len(s.prompt_ids) + len(outputs[id(s)]) for s in batch]
        got = sampler.launch(logits.clone(), batch, np.array(lens)).read()
        for s in (a, b):  # the host receives the step before
            s.output_ids[:] = outputs[id(s)]
        for i, s in enumerate(batch):
            assert got.next_ids[i] == int(penalized(logits[i], s).argmax()), (step, i)
            if s is not dropped:
                outputs[id(s)].append(got.next_ids[i])
                if seen:
                    s.output_ids.append(got.next_ids[i])


def test_a_line_of_counts_that_changes_hands_has_no_token_of_its_former_row(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 0.2
    first, second = (spec(prompt=(1,), output=output, presence_penalty=1.0, temperature=0.0) for output in ((), (3,)))
    assert sample(sampler, logits, [first]).next_ids == [9]
    assert sample(sampler, logits, [second]).next_ids == [9]


def no_memory(*_: object) -> Tensor:
    raise MemoryError


def test_masked_stop_ids_have_a_finite_logprob(sampler: Sampler) -> None:
    """An infinite log-probability would become null in JSON."""
    output = sample(sampler, random_logits(), [spec(min_new_tokens=1, stop=(2,), ids=[2], top=VOCAB)])
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
    output = sample(sampler, logits, [spec(seed=1), spec(**params), spec(seed=2)])
    assert math.isnan(output.logprobs[1]) and 0 <= output.next_ids[1] < VOCAB
    expected = sample(sampler, healthy, [spec(seed=1), spec(seed=2)])
    assert [output.next_ids[0], output.next_ids[2]] == expected.next_ids
    assert all(math.isfinite(output.logprobs[i]) for i in (0, 2))


def test_all_masked_row_is_flagged(sampler: Sampler) -> None:
    logits = random_logits(1)
    logits[0] = -math.inf
    output = sample(sampler, logits, [spec()])
    assert math.isnan(output.logprobs[0]) and 0 <= output.next_ids[0] < VOCAB


def test_min_new_tokens_needs_no_output_values(sampler: Sampler) -> None:
    """The newest tokens may still be on the device, so each row's number of tokens follows from its position."""
    logits = torch.full((2, VOCAB), -5.0)
    logits[:, 2] = 5.0
    waiting = spec(min_new_tokens=3, stop=(2,), temperature=0.0)
    plain = spec(temperature=0.0)
    stops = [
        sampler.launch(logits.clone(), [plain, waiting], np.array([9, position])).ids.tolist()
        for position in range(3, 8)
    ]
    assert [second == 2 for _, second in stops] == [False, False, False, True, True]
    assert all(first == 2 for first, _ in stops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_float_type_and_padded_rows(sampler: Sampler, dtype: torch.dtype) -> None:
    padded = torch.randn(12, VOCAB + 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    specs = [spec(seed=s, **({"top_k": 9} if s % 3 == 0 else {"temperature": 0.7})) for s in range(12)]
    got = sample(sampler, padded[:, :VOCAB], specs)
    expected = sample(sampler, padded[:, :VOCAB].float().contiguous(), specs)
    assert got.next_ids == expected.next_ids and got.logprobs == pytest.approx(expected.logprobs, abs=1e-6)


def test_prompt_candidates_over_chunks(ops: SamplingOps) -> None:
    """The results for each target are raw log-probabilities in the order of the prompt, for any chunks."""
    logits, targets = random_logits(7), [3, 1, 4, 1, 5, 9, 2]
    prompt = PromptCandidates(ops, {6: np.array(targets)}, top_num=2, requested=[8, 0], device=logits.device)
    for chunk in (slice(0, 3), slice(3, 4), slice(4, 7)):
        prompt.launch(logits[chunk].clone())
    part, expected = prompt.read()[6], logits.log_softmax(-1)
    assert part.token_ids == targets
    assert part.logprobs == pytest.approx([float(expected[i, t]) for i, t in enumerate(targets)], abs=1e-5)
    ranked = expected.argsort(-1, descending=True)
    assert part.ranks == [ranked[i].tolist().index(t) + 1 for i, t in enumerate(targets)]
    assert part.top is not None and part.requested is not None
    for i in range(7):
        assert part.top[i].token_ids == expected[i].topk(2).indices.tolist()
        assert part.requested[i].token_ids == [8, 0]
        assert part.requested[i].logprobs == pytest.approx(expected[i, [8, 0]].tolist(), abs=1e-5)
    plain = PromptCandidates(ops, {0: np.array([1])}, 0, None, logits.device)
    plain.launch(logits[:1].clone())
    assert plain.read()[0].top is None and plain.read()[0].requested is None


def test_prompt_candidates_of_several_entries(ops: SamplingOps) -> None:
    """Each entry gets its own targets, where a chunk ends within an entry, too."""
    logits = random_logits(7)
    targets = {4: np.array([3, 1]), 0: np.array([4, 1, 5, 9]), 2: np.array([2])}
    together = PromptCandidates(ops, targets, 2, [8, 0], logits.device)
    for chunk in logits.split(3):
        together.launch(chunk.clone())
    found, start = together.read(), 0
    assert list(found) == [4, 0, 2]
    for entry, ids in targets.items():
        alone = PromptCandidates(ops, {entry: ids}, 2, [8, 0], logits.device)
        alone.launch(logits[start : start + len(ids)].clone())
        assert found[entry] == alone.read()[entry]
        start += len(ids)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.01},
    {"temperature": 0.6, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3, "output": (4, 4, 7)},
    {"logit_bias": {"4": 2.5, "9": -100.0}, "temperature": 1.7},
    {"allowed_token_ids": [3, 4, 5, 30], "top_p": 0.9},
    {"words": [[7], [4, 9]], "output": (4,), "temperature": 0.3},
]


@pytest.mark.parametrize("mode", ["default", "raw", "sampling"])
def test_a_sampled_token_has_one_logprob_in_all_places(sampler: Sampler, mode: str) -> None:
    """The numbers are equal bit by bit, alone or in a batch with rows of other kinds.

    The vocabulary has many blocks, so that the kernel of plain rows would add up in another order.
    """
    vocab = 1000
    wide = Sampler(vocab, torch.device("cpu"), sampler.ops)
    for seed in range(2):
        specs = [spec(seed=seed, top=vocab, ids=list(range(vocab)), logprobs_mode=mode, **s) for s in SETTINGS]
        logits = 3.0 * torch.randn(len(specs) + 1, vocab, generator=torch.Generator().manual_seed(seed))
        for batch in (specs, [*specs, spec(seed=seed)]):
            output = sample(wide, logits[: len(batch)], batch)
            for row in range(len(specs)):
                token, logprob = output.next_ids[row], output.logprobs[row]
                top, asked = output.top_logprobs[row], output.token_ids_logprobs[row]
                assert top is not None and asked is not None
                assert logprob == asked.logprobs[token] == top.logprobs[top.token_ids.index(token)]
                assert sorted(zip(top.token_ids, top.logprobs, strict=True)) == list(enumerate(asked.logprobs))


@pytest.mark.parametrize("settings", SETTINGS)
def test_modes_name_the_distribution_of_logprobs(sampler: Sampler, settings: dict[str, Any]) -> None:
    logits, every = random_logits(1, seed=3), list(range(VOCAB))
    s = spec(seed=5, ids=every, **settings)
    drawn_from = masked(penalized(logits[0], s), s) / (s.params.temperature or 1.0)
    after = filtered(SamplingOps(), drawn_from[None], Filters.of([s], VOCAB, torch.device("cpu")))[0]
    expected = {"default": drawn_from, "raw": logits[0], "sampling": after}
    token = sample(sampler, logits, [s]).next_ids[0]
    if s.params.is_greedy:
        expected["sampling"] = torch.full((VOCAB,), -math.inf).index_fill(0, torch.tensor([token]), 0.0)
    for mode, distribution in expected.items():
        output = sample(sampler, logits, [spec(seed=5, ids=every, logprobs_mode=mode, **settings)])
        plain = sample(sampler, logits, [spec(seed=5, logprobs_mode=mode, **settings)])
        assert output.next_ids == plain.next_ids == [token], "the mode changes no draw"
        logprobs = distribution.log_softmax(-1).clamp(min=draw.LOWEST)
        asked = output.token_ids_logprobs[0]
        assert asked is not None and asked.logprobs == pytest.approx(logprobs.tolist(), rel=1e-5, abs=2e-5)
        assert plain.logprobs == pytest.approx([float(logprobs[token])], rel=1e-5, abs=2e-5)
    if s.params.is_greedy:
        assert plain.logprobs == [0.0] and sorted(set(asked.logprobs)) == [draw.LOWEST, 0.0]


def test_rows_of_all_modes_in_one_batch(sampler: Sampler) -> None:
    logits = random_logits(6, seed=4)
    modes = ["raw", "default", "sampling", "sampling", "raw", "default"]
    settings: list[dict[str, Any]] = [{"temperature": 0.5}, {}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.5}, {}]
    specs = [spec(seed=i, logprobs_mode=mode, **s) for i, (mode, s) in enumerate(zip(modes, settings, strict=True))]
    together = sample(sampler, logits, specs)
    for i, s in enumerate(specs):
        alone = sample(sampler, logits[i : i + 1], [s])
        assert alone.next_ids[0] == together.next_ids[i]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "special"),
    [
        ({"logprobs_mode": "raw"}, False),
        ({"logprobs_mode": "raw", "temperature": 0.0}, False),
        ({"logprobs_mode": "raw", "temperature": 0.5}, True),
        ({"logprobs_mode": "sampling"}, False),
        ({"logprobs_mode": "sampling", "temperature": 0.5}, False),
        ({"logprobs_mode": "sampling", "temperature": 0.0}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"words": [[1, 2]]}, True),
    ],
)
def test_a_mode_that_changes_nothing_takes_the_plain_path(settings: dict[str, Any], special: bool) -> None:
    assert spec(**settings).special == special


def masked(logits: Tensor, s: SampleSpec) -> Tensor:
    """Apply `allowed_token_ids` and `bad_words` by their definition."""
    logits = logits.clone()
    for token in range(VOCAB):
        if s.params.allowed_token_ids is not None and token not in s.params.allowed_token_ids:
            logits[token] = -math.inf
    for *before, last in s.bad_words_ids:
        if not before or s.output_ids[-len(before) :] == before:
            logits[last] = -math.inf
    return logits


def test_masks_over_steps_and_changing_batches(sampler: Sampler) -> None:
    """A mask follows its row through changes of the batch, and a word's last token is forbidden after the others."""
    a = spec(allowed_token_ids=list(range(0, VOCAB, 2)), temperature=0.0)
    b = spec(allowed_token_ids=[1, 2, 3], words=[[2]], temperature=0.0)
    every_pair = [[i, j] for i in range(0, VOCAB, 3) for j in range(0, VOCAB, 2)]
    c = spec(words=[[5], *every_pair, [4, 6, 8]], temperature=0.0)
    plain = spec(temperature=0.0)
    assert c.reads_outputs and not b.reads_outputs
    for step, batch in enumerate([[a, plain], [a, plain], [plain, b, a], [c, a, b], [c, b], [a, b, c], [c], [c, a]]):
        logits = random_logits(len(batch), seed=step)
        output = sample(sampler, logits, batch)
        for i, s in enumerate(batch):
            expected = masked(logits[i], s)
            assert output.next_ids[i] == int(expected.argmax())
            assert output.logprobs[i] == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-5)
        for s, token in zip(batch, output.next_ids, strict=True):
            s.output_ids.append(token)


def test_masks_are_made_again_after_a_launch_that_failed(sampler: Sampler) -> None:
    s, logits = spec(allowed_token_ids=[7], words=[[1, 2]], temperature=0.0), random_logits()
    assert sample(sampler, logits, [s]).next_ids == [7]
    sampler.forget()
    assert sample(sampler, logits, [s]).next_ids == [7]


@pytest.mark.parametrize("mode", ["default", "raw", "sampling"])
def test_a_row_without_an_allowed_token_is_flagged(sampler: Sampler, mode: str) -> None:
    nothing = spec(allowed_token_ids=[4], words=[[4]], logprobs_mode=mode)
    logits = random_logits(2)
    output = sample(sampler, logits, [nothing, spec(seed=3)])
    assert output.logprobs[0] == NOTHING_ALLOWED and 0 <= output.next_ids[0] < VOCAB
    assert output.next_ids[1] == sample(sampler, logits[1:], [spec(seed=3)]).next_ids[0]
    logits[0, 4] = math.nan
    assert math.isnan(sample(sampler, logits[:1], [spec(allowed_token_ids=[4], logprobs_mode=mode)]).logprobs[0])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_mask_holds_the_tokens_that_could_be_drawn(sampler: Sampler, settings: dict[str, Any]) -> None:
    logits, every = random_logits(2, seed=7), list(range(VOCAB))
    options = {"seed": 2, "ids": every, "logprobs_mode": "sampling"} | settings
    output = sample(sampler, logits, [spec(mask=VOCAB, **options), spec()])
    asked, mask, token = output.token_ids_logprobs[0], output.sampling_masks[0], output.next_ids[0]
    assert asked is not None and list(output.sampling_masks) == [0]
    possible = {t: value for t, value in enumerate(asked.logprobs) if value > draw.LOWEST}
    assert dict(zip(mask.token_ids, mask.logprobs, strict=True)) == pytest.approx(possible, abs=1e-6)
    assert mask.logprobs == sorted(mask.logprobs, reverse=True) and token in mask.token_ids
    plain = sample(sampler, logits[:1], [spec(mask=VOCAB, seed=2, **settings)])
    assert (plain.next_ids[0], plain.sampling_masks[0]) == (token, mask), "the mode of other numbers changes no mask"


def test_a_mask_with_too_many_tokens_is_empty(sampler: Sampler) -> None:
    logits = torch.full((2, VOCAB), -3.0)
    logits[:, :5] = 1.0
    output = sample(sampler, logits, [spec(mask=4, top_k=2), spec(mask=5, top_k=2)])
    assert output.sampling_masks[0].token_ids == [] and sorted(output.sampling_masks[1].token_ids) == [0, 1, 2, 3, 4]


@pytest.mark.cuda
@pytest.mark.parametrize("fused", [True, False])
def test_cuda_waits_for_nothing_and_gives_what_the_cpu_gives(sampler: Sampler, fused: bool) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.7, "top": 3},
        {"min_p": 0.05, "ids": [4, 2]},
        {"presence_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {"4": 1.0}},
        {"min_new_tokens": 9, "stop": (2, 3)},
        {"ids": []},
        {"allowed_token_ids": [1, 2, 3], "logprobs_mode": "raw"},
        {"words": [[4], [0, 5]], "top_k": 6, "logprobs_mode": "sampling"},
        {"top_k": 6, "mask": 12},
        {"temperature": 0.0, "mask": 2},
    ]
    batches = [settings[:3], settings, settings[3:], settings[:1], settings[-1:]]
    on_device = SamplingOps()
    if fused:
        from verl_server.sampling.fused import FusedOps

        on_device = FusedOps()
    on_cuda = Sampler(VOCAB, torch.device("cuda"), on_device)
    for step, batch in enumerate(batches * 2):
        specs = [spec(seed=s, output=(step,) * step, **params) for s, params in enumerate(batch * 5)]
        positions = np.arange(len(specs)) + 3 + step
        logits = random_logits(len(specs), seed=step)
        moved = logits.cuda()
        if step >= len(batches):  # the first round compiles
            torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = on_cuda.launch(moved, specs, positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        got, expected = sampled.read(), sampler.launch(logits, specs, positions).read()
        assert got.next_ids == expected.next_ids == sampled.ids.tolist()
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert got.policy_logprobs == pytest.approx(expected.policy_logprobs, abs=1e-4)
        assert got.has_choice == expected.has_choice
        for ours, theirs in zip(
            got.top_logprobs + got.token_ids_logprobs, expected.top_logprobs + expected.token_ids_logprobs, strict=True
        ):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
