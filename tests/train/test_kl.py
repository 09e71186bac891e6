"""Estimates of the KL, their gradients and the penalties of rewards equal formulas that are written out here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.train.conftest import make_trajectory
from tests.train.test_losses import LENGTHS, by_loops, evaluate, random_samples
from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.batches import Sample
from verl_server.train.gae import TurnChain
from verl_server.train.grpo import group_advantages
from verl_server.train.kl import Estimator, kl_estimates, with_penalties
from verl_server.train.losses import LossConfig
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.ppo_options import PPOConfig

COEF = 0.3


def by_formula(policy: float, reference: float, estimator: Estimator) -> tuple[float, float]:
    """Return (estimate, its derivative by the policy's log-probability), with r = reference / policy."""
    r = math.exp(reference - policy)
    values = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}
    slopes = {"k1": 1.0, "k2": -math.log(r), "k3": 1 - r}
    return values[estimator], slopes[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_and_their_derivatives(estimator: Estimator) -> None:
    pairs = [(-1.0, -1.0), (-0.5, -2.0), (-3.0, -0.25), (-1.0, -1.001)]
    policy = torch.tensor([pair[0] for pair in pairs], dtype=torch.float64, requires_grad=True)
    found = kl_estimates(policy, torch.tensor([pair[1] for pair in pairs], dtype=torch.float64), estimator)
    (slopes,) = torch.autograd.grad(found.sum(), policy)
    expected = [by_formula(*pair, estimator) for pair in pairs]
    assert found.tolist() == pytest.approx([value for value, _ in expected])
    assert slopes.tolist() == pytest.approx([slope for _, slope in expected])


def test_which_estimate_has_which_gradient() -> None:
    """Sums over all tokens of a distribution show what the docstring of `kl` and the refusals of options say."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.5, 0.4, 0.0], dtype=torch.float64).log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    def mean_gradient(estimator: Estimator, *, in_reward: bool = False) -> torch.Tensor:
        policy = logits.log_softmax(0)
        estimates = kl_estimates(policy, reference, estimator)
        return gradient((policy.detach().exp() * (estimates.detach() * policy if in_reward else estimates)).sum())

    policy = logits.log_softmax(0)
    reverse = gradient((policy.exp() * (policy - reference)).sum())
    forward = gradient((reference.exp() * (reference - logits.log_softmax(0))).sum())
    zero = torch.zeros_like(reverse)
    torch.testing.assert_close(mean_gradient("k1"), zero, rtol=0, atol=1e-12)
    torch.testing.assert_close(mean_gradient("k2"), reverse)
    torch.testing.assert_close(mean_gradient("k3"), forward)
    torch.testing.assert_close(mean_gradient("k1", in_reward=True), reverse)
    for estimator in ("k2", "k3"):
        found = mean_gradient(estimator, in_reward=True)
        assert all((found - other).abs().max() > 0.05 for other in (reverse, forward, zero))


@pytest.mark.parametrize("masks", [{}, {"token_mask": (0.5, 1.6)}])
@pytest.mark.parametrize("estimator", [None, "k2", "k3"])
@pytest.mark.parametrize("loss", ["clip_behaviour", "decoupled"])
def test_the_loss_has_the_kl_of_each_token(loss: Any, estimator: Estimator | None, masks: dict[str, Any]) -> None:
    """It is added for masked tokens, too, and for those of which the policy's term is clipped."""
    config = LossConfig(loss=loss, kl_coef=COEF, kl_estimator=estimator, **masks)
    samples, current = random_samples()
    far = [[value + 0.4 * (-1) ** place for place, value in enumerate(row)] for row in current]
    samples = [dataclasses.replace(s, reference_logprobs=torch.tensor(r)) for s, r in zip(samples, far, strict=True)]
    value, gradients, sums = evaluate(config, samples, current)
    expected, slopes, _ = by_loops(config, samples, current)
    terms = [
        [by_formula(now, kept, estimator or "k3") for now, kept in zip(row, other, strict=True)]
        for row, other in zip(current, far, strict=True)
    ]
    assert value == pytest.approx(expected + COEF * sum(term for row in terms for term, _ in row), rel=1e-5)
    assert sums["loss"] == pytest.approx(value)
    for own, policy, row in zip(gradients, slopes, terms, strict=True):
        assert own == pytest.approx([a + COEF * b for a, (_, b) in zip(policy, row, strict=True)], rel=1e-4, abs=1e-6)
    assert len(gradients) == len(LENGTHS)


def test_penalties_in_rewards_leave_the_loss_as_it_is() -> None:
    samples, current = random_samples()
    scored = [dataclasses.replace(s, reference_logprobs=torch.zeros(n)) for s, n in zip(samples, LENGTHS, strict=True)]
    config = LossConfig(kl_coef=COEF, kl_in="reward")
    assert evaluate(config, scored, current) == evaluate(LossConfig(), samples, current)


def penalized(group: int, member: int, reward: float, reference: list[float], **session: Any) -> Sample:
    """A sample whose tokens were sampled with log-probability -1."""
    trajectory = make_trajectory(group, reward, len(reference), seed=member)
    trajectory.member, trajectory.session = member, session.get("session")
    return Sample(trajectory, reward, reference_logprobs=torch.tensor(reference))


@pytest.mark.usefixtures("one_rank")
def test_penalties_of_episodes_enter_the_comparison_of_their_group() -> None:
    """Of an episode with branches, the sum counts once, and each branch has the advantage of the episode."""
    samples = [
        penalized(0, 0, 2.0, [-2.0, -3.0]),  # penalty 1 + 2
        penalized(0, 1, -2.0, [-1.0]),  # 0
        penalized(1, 0, 0.0, [-1.5], session="a"),  # 0.5 and, in its other branch, 1: 1.5
        penalized(1, 1, 0.0, [-0.5], session="b"),  # -0.5
        penalized(1, 0, 0.0, [-2.0], session="a"),
        penalized(2, 0, 0.0, [-9.0]),  # alone in its group
    ]
    found = with_penalties(samples, 0.5)
    assert [sample.trajectory for sample in found] == [sample.trajectory for sample in samples]
    assert [sample.advantage for sample in found] == pytest.approx([2 - 0.75, -2 + 0.75, -0.5, 0.5, -0.5, 0.0])
    assert with_penalties([], 0.5) == []


def test_penalties_of_turns_are_those_of_their_tokens() -> None:
    trajectory = Trajectory(task=Task(seed=0, group=0))
    for length, reward in ((2, 0.5), (1, 1.0)):
        trajectory.append_observation({}, [1, 2])
        trajectory.append_output([5] * length, [-1.0] * length, ["0"] * length)
        trajectory.turns[-1].reward = reward
    trajectory.finish(StopReason.DONE)
    chain = TurnChain.of(trajectory)
    assert chain.penalized(torch.tensor([0.25, -0.5, 2.0])).rewards.tolist() == [0.75, -1.0]
    assert chain.rewards.tolist() == [0.5, 1.0]


def test_groups_with_equal_rewards_stay_if_the_kl_holds_them() -> None:
    trajectories = [make_trajectory(group, reward) for group, reward in ((0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0))]
    assert [s.trajectory.task.group for s in group_advantages(trajectories, normalize_std=False)] == [0, 0]
    for normalize in (False, True):
        found = group_advantages(trajectories, normalize, keeps_equal=True)
        expected = [1.0, -1.0, 0.0, 0.0] if normalize else [0.5, -0.5, 0.0, 0.0]
        assert [sample.advantage for sample in found] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": -0.1}, r"--grpo\.kl-coef must be finite and not negative, not -0\.1"),
        ({"kl_coef": math.nan}, r"--grpo\.kl-coef must be finite"),
        ({"kl_in": "reward"}, r"--grpo\.kl-in and --grpo\.kl-estimator have no effect with --grpo\.kl-coef 0"),
        ({"kl_estimator": "k3"}, r"have no effect with --grpo\.kl-coef 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, r"k1 in the loss has a mean gradient of 0, so it would hold nothing"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"}, r"k3 in the reward does not have the gradient"),
        ({"kl_coef": 0.1, "kl_in": "reward", "normalize_std": True}, r"cannot be combined with --grpo\.normalize-std"),
    ],
)
def test_options_without_effect_or_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        GRPOConfig(**options)


def test_options_that_hold_the_policy() -> None:
    assert not GRPOConfig().has_kl_loss and not GRPOConfig().has_kl_reward
    assert GRPOConfig(kl_coef=0.1).has_kl_loss and GRPOConfig(kl_coef=0.1, kl_estimator="k2").has_kl_loss
    assert PPOConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1").has_kl_reward, "PPO whitens over the step"
    with pytest.raises(BadRequestError, match=r"--reference-path is for --grpo\.kl-coef above 0"):
        TrainArgs("m", env_url="http://e", reference_path="other")
