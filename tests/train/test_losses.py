"""Each loss, its gradient, its masks and its metrics equal plain loops over tokens, and the options are checked."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torchrun import run_ranks
from tests.train.conftest import make_trajectory
from tests.train.loss_ranks import CONFIGS, main, make_samples
from verl_server.errors import BadRequestError
from verl_server.train import grpo
from verl_server.train.batches import MicroBatch, Sample
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.losses import LossConfig, mean_losses, policy_loss, token_factors
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy

CPU = torch.device("cpu")
LOSSES: tuple[Any, ...] = ("clip_behaviour", "tis", "decoupled", "unclipped")
TOKEN_MASK, SEQUENCE_MASK = (0.5, 1.6), (0.9, 1.2)
LENGTHS = [3, 1, 7, 5, 2]


def random_samples(seed: int = 1) -> tuple[list[Sample], list[list[float]]]:
    """Return trajectories with proximal log-probabilities, and current ones [trajectory][token]."""
    draw = random.Random(seed)
    samples, current = [], []
    for number, length in enumerate(LENGTHS):
        trajectory = make_trajectory(0, 1.0, length, seed=number)
        behaviour = [draw.uniform(-3, -0.5) for _ in range(length)]
        trajectory.logprobs[2:] = behaviour
        proximal = [value + draw.gauss(0, 0.6) for value in behaviour]
        current.append([value + draw.gauss(0, 0.3) for value in proximal])
        samples.append(Sample(trajectory, draw.choice([-1.3, 0.8]), torch.tensor(proximal)))
    return samples, current


def evaluate(
    config: LossConfig, samples: list[Sample], current: list[list[float]], entropy_coef: float = 0.0
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Return (loss, gradients [trajectory][token], sums of metrics) for one batch of all samples."""
    flat = torch.tensor([value for row in current for value in row], requires_grad=True)
    loss, sums = policy_loss(flat, None, MicroBatch.of(samples, CPU), config, entropy_coef)
    loss.backward()
    assert flat.grad is not None
    gradients = [part.tolist() for part in flat.grad.split([len(row) for row in current])]
    return loss.item(), gradients, {name: float(value) for name, value in sums.items()}


def by_loops(
    config: LossConfig, samples: list[Sample], current: list[list[float]]
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Compute what `evaluate` returns, with the formulas written out and the gradients worked out by hand."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss, gradients = 0.0, []
    sums = dict.fromkeys(["clip_fraction", "truncated_fraction", "masked_fraction", "behaviour_kl"], 0.0)
    sums |= {"ratio": 0.0, "squared_ratio": 0.0}
    for sample, row in zip(samples, current, strict=True):
        behaviour = sample.trajectory.logprobs[2:]
        assert sample.proximal_logprobs is not None
        proximal = sample.proximal_logprobs.tolist()
        geometric = math.prod(math.exp(p - b) for p, b in zip(proximal, behaviour, strict=True)) ** (1 / len(row))
        own = []
        for now, before, sampled in zip(row, proximal, behaviour, strict=True):
            weight, whole = math.exp(before - sampled), math.exp(now - sampled)
            sums["ratio"] += whole
            sums["squared_ratio"] += whole**2
            sums["behaviour_kl"] += whole - 1 - math.log(whole)
            is_kept = True
            if config.token_mask is not None:
                is_kept = config.token_mask[0] <= weight <= config.token_mask[1]
            if config.sequence_mask is not None:
                is_kept = is_kept and config.sequence_mask[0] <= geometric <= config.sequence_mask[1]
            sums["masked_fraction"] += not is_kept
            sums["truncated_fraction"] += weight > config.tis_bound
            advantage = sample.advantage
            if config.loss == "unclipped":
                term, slope = whole * advantage, whole * advantage
            else:
                ratio = whole if config.loss == "clip_behaviour" else math.exp(now - before)
                factor = {"clip_behaviour": 1.0, "tis": min(weight, config.tis_bound), "decoupled": weight}[config.loss]
                sums["clip_fraction"] += not low <= ratio <= high
                term = factor * min(ratio * advantage, min(max(ratio, low), high) * advantage)
                is_flat = ratio > high if advantage > 0 else ratio < low
                slope = 0.0 if is_flat else factor * ratio * advantage
            loss -= term * is_kept
            own.append(-slope * is_kept)
        gradients.append(own)
    return loss, gradients, sums


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"token_mask": TOKEN_MASK},
        {"sequence_mask": SEQUENCE_MASK},
        {"token_mask": TOKEN_MASK, "sequence_mask": SEQUENCE_MASK},
    ],
    ids=["no mask", "tokens", "sequences", "both"],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_equal_plain_loops(loss: Any, masks: dict[str, Any]) -> None:
    config = LossConfig(loss=loss, tis_bound=1.5 if loss == "tis" else 2.0, **masks)
    samples, current = random_samples()
    value, gradients, sums = evaluate(config, samples, current)
    expected, slopes, totals = by_loops(config, samples, current)
    assert value == pytest.approx(expected, rel=1e-5)
    for own, slope in zip(gradients, slopes, strict=True):
        assert own == pytest.approx(slope, rel=1e-4, abs=1e-6)
    optional = {"truncated_fraction": loss == "tis", "masked_fraction": bool(masks)}
    for name, total in totals.items():
        if optional.get(name, True):
            assert sums[name] == pytest.approx(total, rel=1e-4), name
        else:
            assert name not in sums
    # The example has tokens of each kind, so that no branch of the formulas is untested.
    tokens = sum(LENGTHS)
    assert (loss == "unclipped") == (totals["clip_fraction"] == 0) and totals["clip_fraction"] < tokens
    assert bool(masks) == (totals["masked_fraction"] > 0) and totals["masked_fraction"] < tokens
    assert 0 < totals["truncated_fraction"] < tokens


def earlier_loss(
    logprobs: Tensor, entropy: Tensor, batch: MicroBatch, config: LossConfig, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss as it was when there was one loss only."""
    ratio = (logprobs - batch.behaviour_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).sum()
    sums = {"clip_fraction": (ratio != clipped).sum(), "log_allowed_mass": batch.log_weights.sum()}
    sums["entropy"] = entropy.detach().sum()
    loss = loss - entropy_coef * entropy.sum()
    return loss, {"loss": loss.detach()} | sums


# In a long sum, a difference of the last bit may be lost, so most batches are of one token.
@pytest.mark.parametrize(("n", "seed"), [(4096, 0), *((1, seed) for seed in range(60))])
def test_the_default_loss_is_bit_for_bit_what_it_was(n: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = MicroBatch(
        tokens=torch.zeros((1, n + 1), dtype=torch.long),
        positions=torch.arange(1, n + 1),
        behaviour_logprobs=-torch.rand(n, generator=draw) * 4,
        advantages=torch.randn(n, generator=draw),
        log_weights=-torch.rand(n, generator=draw),
    )
    start = batch.behaviour_logprobs + torch.randn(n, generator=draw) * 0.3
    found = []
    for function in (policy_loss, earlier_loss):
        logprobs = start.clone().requires_grad_()
        entropy = (start.abs() + 1).clone().requires_grad_()
        loss, sums = function(logprobs, entropy, batch, GRPOConfig(), 0.1)
        loss.backward()
        found.append((loss, logprobs.grad, entropy.grad, sums))
    (new, new_slope, new_entropy, new_sums), (old, old_slope, old_entropy, old_sums) = found
    assert torch.equal(new, old)
    assert torch.equal(new_slope, old_slope) and torch.equal(new_entropy, old_entropy)  # type: ignore[arg-type]
    assert all(torch.equal(new_sums[name], value) for name, value in old_sums.items())


@pytest.mark.parametrize("masks", [{}, {"token_mask": TOKEN_MASK, "sequence_mask": SEQUENCE_MASK}])
@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_all_losses_have_the_policy_gradient(loss: Any, masks: dict[str, Any]) -> None:
    samples, _ = random_samples()
    current = [sample.trajectory.logprobs[2:] for sample in samples]
    samples = [
        dataclasses.replace(sample, proximal_logprobs=torch.tensor(row))
        for sample, row in zip(samples, current, strict=True)
    ]
    _, gradients, sums = evaluate(LossConfig(loss=loss, **masks), samples, current)
    for sample, own in zip(samples, gradients, strict=True):
        assert own == [pytest.approx(-sample.advantage)] * len(own)
    metrics = mean_losses(sums, 1 / sum(LENGTHS))
    assert metrics["effective_sample_size"] == pytest.approx(1.0)
    assert metrics["behaviour_kl"] == metrics["clip_fraction"] == metrics.get("masked_fraction", 0.0) == 0.0


@pytest.mark.parametrize("masks", [{}, {"token_mask": TOKEN_MASK}])
@pytest.mark.parametrize("loss", LOSSES)
def test_without_proximal_logprobs_the_current_policy_is_the_proximal_one(loss: Any, masks: dict[str, Any]) -> None:
    config = LossConfig(loss=loss, **masks)
    samples, current = random_samples()
    without = [dataclasses.replace(sample, proximal_logprobs=None) for sample in samples]
    same = [
        dataclasses.replace(sample, proximal_logprobs=torch.tensor(row))
        for sample, row in zip(samples, current, strict=True)
    ]
    assert evaluate(config, without, current) == evaluate(config, same, current)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_changes_no_value(loss: Any) -> None:
    """One padded batch has the sums and gradients of a batch for each trajectory, in any order."""
    config = LossConfig(loss=loss, token_mask=TOKEN_MASK, sequence_mask=SEQUENCE_MASK)
    samples, current = random_samples(seed=2)
    loss_of_all, gradients, sums = evaluate(config, samples, current)
    alone = [evaluate(config, [sample], [row]) for sample, row in zip(samples, current, strict=True)]
    assert loss_of_all == pytest.approx(sum(each[0] for each in alone), rel=1e-5)
    for together, each in zip(gradients, alone, strict=True):
        assert together == pytest.approx(each[1][0], rel=1e-5)
    for name, value in sums.items():
        assert value == pytest.approx(sum(each[2][name] for each in alone), rel=1e-4, abs=1e-6), name
    reverse = evaluate(config, samples[::-1], current[::-1])
    assert reverse[0] == pytest.approx(loss_of_all, rel=1e-5) and reverse[1][::-1] == gradients


def test_a_batch_without_samples_has_sums_of_nothing() -> None:
    for loss in LOSSES:
        config = LossConfig(loss=loss, token_mask=TOKEN_MASK, sequence_mask=SEQUENCE_MASK)
        value, _, sums = evaluate(config, [], [])
        assert value == 0.0 and not any(sums.values())
        assert mean_losses(sums, 1.0)["effective_sample_size"] == 0.0


def test_metrics_by_hand() -> None:
    """Two tokens, r = 3 and r = 1: the effective sample size is 16 / 10 of 2 tokens."""
    sample = Sample(make_trajectory(0, 1.0, 2), 1.0)
    _, _, sums = evaluate(LossConfig(), [sample], [[-1.0 + math.log(3), -1.0]])
    metrics = mean_losses(sums, 1 / 2)
    assert metrics["effective_sample_size"] == pytest.approx(0.8)
    assert metrics["behaviour_kl"] == pytest.approx((3 - 1 - math.log(3)) / 2)
    assert metrics["clip_fraction"] == 0.5
    assert "ratio" not in metrics and "squared_ratio" not in metrics
    _, _, sums = evaluate(LossConfig(), [sample], [[500.0, -1.0]])
    assert all(math.isfinite(value) for value in mean_losses(sums, 1 / 2).values()), "one token made metrics infinite"


@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_that_a_mask_leaves_out_cannot_break_the_gradient(loss: Any) -> None:
    """Its probability grew by more than float32 can express."""
    trajectory = make_trajectory(0, 1.0, 3)
    trajectory.logprobs[2:] = [-1.0, -101.0, -1.0]
    current = [[-1.0, -0.5, -1.0]]
    sample = Sample(trajectory, 1.0, torch.tensor(current[0]))
    _, gradients, sums = evaluate(LossConfig(loss=loss, token_mask=TOKEN_MASK), [sample], current)
    assert gradients == [[-1.0, 0.0, -1.0]] and sums["masked_fraction"] == 1
    value, gradients, _ = evaluate(LossConfig(loss=loss, sequence_mask=SEQUENCE_MASK), [sample], current)
    assert (value, gradients) == (0.0, [[0.0] * 3])


@pytest.mark.parametrize("masks", [{"token_mask": TOKEN_MASK}, {"sequence_mask": SEQUENCE_MASK}])
def test_a_mask_hides_no_broken_logprob(masks: dict[str, Any]) -> None:
    sample = Sample(make_trajectory(0, 1.0, 2), 1.0)
    sample.trajectory.logprobs[2] = math.nan
    value, _, sums = evaluate(LossConfig(**masks), [sample], [[-1.0, -1.0]])
    assert math.isnan(value) and sums["masked_fraction"] == 0


@pytest.mark.parametrize(
    ("loss", "factors"),
    [
        ("clip_behaviour", [1.0, 0.0, 1.0, 1.0]),
        ("tis", [1.0, 0.0, 1.5, 0.75]),
        ("decoupled", [1.0, 0.0, 2.0, 0.75]),
        ("unclipped", [1.0, 0.0, 1.0, 1.0]),
    ],
)
def test_factors_of_tokens_by_hand(loss: Any, factors: list[float]) -> None:
    weights = [1.0, 4.0, 2.0, 0.75]
    sample = Sample(make_trajectory(0, 1.0, 4), 1.0, torch.tensor([-1.0 + math.log(weight) for weight in weights]))
    config = LossConfig(loss=loss, token_mask=(0.5, 3.0), tis_bound=1.5 if loss == "tis" else 2.0)
    found, kept = token_factors(torch.zeros(4), MicroBatch.of([sample], CPU), config)
    assert found.tolist() == pytest.approx(factors) and kept.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_bound": 3.0}, r"--grpo\.tis-bound is for --grpo\.loss tis, .* clip_behaviour: remove it, or name tis"),
        ({"loss": "decoupled", "tis_bound": 3.0}, "no effect on decoupled"),
        ({"loss": "tis", "tis_bound": math.inf}, r"finite and more than 0, not inf\. --grpo\.loss decoupled"),
        ({"loss": "tis", "tis_bound": 0.0}, "more than 0, not 0"),
        ({"loss": "unclipped", "clip_low": 0.1}, r"no effect on --grpo\.loss unclipped: remove them"),
        ({"loss": "unclipped", "clip_high": 0.1}, r"no effect on --grpo\.loss unclipped: remove them"),
        ({"clip_low": 1.5}, "from 0 to 1"),
        ({"clip_high": -0.1}, "not negative"),
        ({"clip_high": math.nan}, "not negative"),
        ({"token_mask": (1.5, 5.0)}, r"--grpo\.token-mask needs a bound below 1 and a bound above 1.*not 1\.5 5"),
        ({"sequence_mask": (0.5, 0.9)}, r"--grpo\.sequence-mask needs .* not 0\.5 0\.9"),
        ({"sequence_mask": (-0.5, 2.0)}, r"--grpo\.sequence-mask needs"),
        ({"token_mask": (0.5, math.nan)}, r"--grpo\.token-mask needs"),
    ],
)
def test_options_without_effect_or_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        GRPOConfig(**options)


def test_each_loss_permits_its_own_options() -> None:
    LossConfig(loss="tis", tis_bound=5.0, clip_low=0.1, token_mask=(0.5, 5.0))
    LossConfig(loss="decoupled", token_mask=(0.5, 5.0), sequence_mask=(0.0, math.inf))
    LossConfig(loss="unclipped", sequence_mask=(0.99, 1.01))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 0),
        ({"loss": "unclipped"}, 0),
        ({"loss": "tis"}, 1),
        ({"loss": "decoupled"}, 1),
        ({"token_mask": (0.5, 5.0)}, 1),
        ({"sequence_mask": (0.5, 5.0)}, 1),
        ({"loss": "tis", "epochs": 1}, 0),  # the policy before its only optimizer step is the proximal one
    ],
)
def test_proximal_logprobs_are_those_before_the_first_optimizer_step(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], passes: int
) -> None:
    config = GRPOConfig(**{"epochs": 2, "minibatches": 1, "warmup_steps": 0, "learning_rate": 1e-2} | options)
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), config, 10, CPU)
    forward, without_gradient = trainer.policy.forward, []
    batches: list[tuple[Tensor, Tensor | None]] = []

    def counted(*arguments: Any, **settings: Any) -> Any:
        without_gradient.append(not torch.is_grad_enabled())
        return forward(*arguments, **settings)

    def noted(logprobs: Tensor, entropy: Tensor, batch: MicroBatch, *others: Any) -> Any:
        batches.append((logprobs.detach(), batch.proximal_logprobs))
        return policy_loss(logprobs, entropy, batch, *others)

    monkeypatch.setattr(trainer.policy, "forward", counted)
    monkeypatch.setattr(grpo, "policy_loss", noted)
    learned = trainer.update(make_samples(), 0)
    assert sum(without_gradient) == passes
    assert len(batches) == config.epochs
    if passes == 0:
        assert all(proximal is None for _, proximal in batches)
        return
    (first, first_proximal), (second, second_proximal) = batches
    assert first_proximal is not None and second_proximal is not None
    torch.testing.assert_close(first_proximal, first)
    # Each epoch has another order of the trajectories. The log-probabilities go with their tokens.
    assert first_proximal.sort().values.tolist() == second_proximal.sort().values.tolist()
    assert (second - second_proximal).abs().max() > 0.01
    assert 0 < learned.losses["effective_sample_size"] < 1


@pytest.mark.usefixtures("one_rank")
def test_every_metric_is_documented(policy_folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    names: set[str] = set()
    for config in CONFIGS.values():
        trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), config, 10, CPU)
        names |= trainer.update(make_samples(), 0).losses.keys()
    assert {"masked_fraction", "truncated_fraction", "entropy", "grad_norm"} <= names
    assert [name for name in sorted(names) if f"| `{name}` |" not in page] == []


def test_several_ranks_and_empty_micro_batches_change_no_value(policy_folder: Path, tmp_path: Path) -> None:
    main(str(policy_folder), str(tmp_path / "1"))
    arguments = [str(policy_folder), str(tmp_path / "2")]
    assert run_ranks(2, "tests.train.loss_ranks", arguments, tmp_path / "log", 120) == [0, 0], (
        tmp_path / "log"
    ).read_text()
    one, two = (torch.load(tmp_path / name) for name in ("1", "2"))
    assert one.keys() == two.keys() == CONFIGS.keys()
    for name, (losses, weights) in one.items():
        assert two[name][0] == pytest.approx(losses, rel=1e-3, abs=1e-5), name
        torch.testing.assert_close(two[name][1], weights, rtol=0, atol=1e-5)
        assert ("masked_fraction" in losses) == CONFIGS[name].has_masks
    assert 0 < one["tis, masks"][0]["masked_fraction"] < 1 and 0 < one["tis"][0]["truncated_fraction"] < 1
