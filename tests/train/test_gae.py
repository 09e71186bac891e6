"""Advantages of turns match a reference that is written out here, and each token gets the advantage of its turn."""

from __future__ import annotations

import random

import pytest
import torch

from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.batches import sampled_positions
from verl_server.train.gae import TurnChain, gae, padded


def reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: a sum over all later turns of (gamma lam)^k times the error of the prediction at turn t + k."""
    following = [*values[1:], 0.0]
    errors = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * error for k, error in enumerate(errors[turn:])) for turn in range(len(rewards))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])
def test_advantages_are_those_of_the_definition(gamma: float, lam: float) -> None:
    """Chains of 1 to 9 turns, padded to one tensor."""
    draw = random.Random(3)
    chains = [[(draw.gauss(0, 1), draw.gauss(0, 2)) for _ in range(turns)] for turns in (9, 1, 4, 2, 9)]
    rewards = padded([torch.tensor([r for r, _ in chain], dtype=torch.float64) for chain in chains])
    values = padded([torch.tensor([v for _, v in chain], dtype=torch.float64) for chain in chains])
    advantages, returns = gae(rewards, values, gamma, lam)
    assert advantages.shape == returns.shape == (5, 9) and advantages.dtype == torch.float64
    for row, chain in enumerate(chains):
        expected = reference([r for r, _ in chain], [v for _, v in chain], gamma, lam)
        assert advantages[row].tolist() == pytest.approx([*expected, *[0.0] * (9 - len(chain))], abs=1e-12)
    assert torch.equal(returns, advantages + values)


def test_with_lambda_1_a_return_is_the_sum_of_the_rewards_that_follow() -> None:
    rewards, values = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[5.0, -7.0, 9.0]])
    advantages, returns = gae(rewards, values, 0.5, 1.0)
    assert returns.tolist() == [[1.5, 1.0, 2.0]]
    assert advantages.tolist() == [[-3.5, 8.0, -7.0]]


def test_no_chains_at_all() -> None:
    advantages, returns = gae(padded([]), padded([]), 1.0, 1.0)
    assert advantages.shape == returns.shape == (0, 0)


def episode(rewards: list[float | None], lengths: list[int]) -> Trajectory:
    """An episode whose turns have two tokens of observation and actions of `lengths`."""
    trajectory = Trajectory(task=Task(seed=0))
    for reward, length in zip(rewards, lengths, strict=True):
        trajectory.append_observation({}, [7, 8])
        trajectory.append_output([9] * length, [-1.0] * length, ["0"] * length)
        trajectory.turns[-1].reward = reward
    trajectory.finish(StopReason.DONE)
    return trajectory


def test_the_chain_of_an_episode() -> None:
    chain = TurnChain.of(episode([0.25, None, 1.0], [1, 3, 2]))
    assert chain.states.tolist() == [1, 4, 9], "the last token before each action"
    assert chain.rewards.tolist() == [0.25, 0.0, 1.0]
    assert chain.turn_of_token.tolist() == [0, 1, 1, 1, 2, 2]
    assert chain.is_own.tolist() == [True, True, True]


def test_a_reward_that_no_turn_has_comes_with_the_last_action() -> None:
    """Of an agent's episode a reward function is the judge. A turn that was cut before it sampled has no action."""
    trajectory = episode([0.25, 0.0, 0.5], [2, 1, 0])
    trajectory.reward = 3.0
    chain = TurnChain.of(trajectory)
    assert chain.rewards.tolist() == [0.25, 2.75] and len(chain.states) == 2


def test_a_branch_trains_only_its_own_turns_and_has_the_whole_reward() -> None:
    """The first turn belongs to another branch, and the policy had no choice about a token of the second one."""
    trajectory = episode([None, None], [2, 3])
    trajectory.loss_mask[2:4] = [0, 0]
    trajectory.has_choice = [0, 0, 1, 1, 0, 0, 1, 0, 1]
    trajectory.reward = 1.0
    chain = TurnChain.of(trajectory)
    assert chain.is_own.tolist() == [False, True] and chain.rewards.tolist() == [0.0, 1.0]
    assert sampled_positions(trajectory).tolist() == [6, 8] and chain.turn_of_token.tolist() == [1, 1]
    advantages, _ = gae(chain.rewards[None], torch.tensor([[0.5, 0.75]]), 1.0, 1.0)
    assert advantages[0][chain.turn_of_token].tolist() == [0.25, 0.25]


def test_an_action_without_a_prompt_is_valued_after_the_first_token() -> None:
    trajectory = Trajectory(task=Task(seed=0))
    trajectory.append_observation({}, [])
    trajectory.append_output([9, 9], [-1.0, -1.0], ["0", "0"])
    trajectory.turns[0].reward = 1.0
    trajectory.finish(StopReason.DONE)
    chain = TurnChain.of(trajectory)
    assert chain.states.tolist() == [0] and chain.turn_of_token.tolist() == [0]
