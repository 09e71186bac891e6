"""Generalized advantage estimation over turns: what a turn was worth, beyond what the critic had expected.

`ppo` calls it. The policy acts once a turn: the action is all the tokens that it sampled there, and the state is all
the tokens before them. `TurnChain` is a trajectory as such a chain of states, actions and rewards; `gae` makes the
advantages and the critic's targets of its rewards and values.

A branch of an agent's episode is a chain of its own, from the first turn of the episode to the last one of the branch,
and it ends with the reward of the whole episode, as each branch has the episode's advantage in GRPO. Turns that several
branches share are part of each chain, but are trained in one of them only: the one whose loss mask has their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_server.rollout.trajectory import Trajectory
from verl_server.train.batches import sampled_positions


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of each turn, both of the shape and dtype of `rewards`.

    rewards [chains, turns] has the reward of each action, and values [chains, turns] the value of the state before it.
    A chain with fewer turns is padded with zeros on the right, and so are its results. With V = 0 behind the last turn,

        delta_t     = r_t + gamma V_{t+1} - V_t
        advantage_t = delta_t + gamma lam advantage_{t+1}
        return_t    = advantage_t + V_t

    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", arXiv
    1506.02438, equations 11 to 16. `lam` 1 is the discounted sum of the rewards that follow, minus the value: no bias,
    much variance. `lam` 0 is the error of the critic's prediction one turn ahead. An end at a limit of turns or tokens
    is an end: nothing follows it, because the reward that the policy is trained for has been given.
    """
    advantages = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))  # gamma V_{t+1} + gamma lam advantage_{t+1}
    for turn in reversed(range(rewards.shape[1])):
        advantages[:, turn] = rewards[:, turn] + ahead - values[:, turn]
        ahead = gamma * (values[:, turn] + lam * advantages[:, turn])
    return advantages, advantages + values


@dataclass(frozen=True, slots=True)
class TurnChain:
    """The turns of a trajectory in which the policy acted."""

    states: Tensor
    """[turns] int64: position of the last token before each action. The critic's value of the turn is read there."""
    rewards: Tensor
    """[turns] fp32: the reward of each action."""
    is_own: Tensor
    """[turns] bool: False for a turn that another branch of the episode trains."""
    turn_of_token: Tensor
    """[n] int64: the turn of each token to train on, in the order of `sampled_positions`."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> TurnChain:
        """Return the chain of a trajectory that has a reward and a token to train on.

        The rewards of the turns are those that the environment gave. Their sum is the reward of the trajectory: what is
        missing comes with the last action (all of it, if a reward function or a rule for failures gave the reward). A
        reward of a turn without an action, which the end of the episode cut, goes to the action before it.
        """
        assert trajectory.reward is not None
        spans, rewards = list[tuple[int, int]](), list[float]()
        for turn in trajectory.turns:
            if turn.action_span[0] < turn.action_span[1]:
                spans.append(turn.action_span)
                rewards.append(turn.reward or 0.0)
            elif rewards:
                rewards[-1] += turn.reward or 0.0
        rewards[-1] += trajectory.reward - sum(rewards)
        starts, ends = (torch.tensor(bounds) for bounds in zip(*spans, strict=True))
        own = [any(trajectory.loss_mask[slice(*span)]) for span in spans]
        return cls(
            states=(starts - 1).clamp(min=0),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            is_own=torch.tensor(own),
            turn_of_token=torch.searchsorted(ends, sampled_positions(trajectory), right=True),
        )

    def penalized(self, penalties: Tensor) -> TurnChain:
        """Return the chain with penalties subtracted from the rewards of its turns.

        `penalties` is fp32 [n], one for each token to train on. Those of a turn are added up. A turn that another
        branch trains keeps its reward here: no advantage of this branch's own turns depends on it.
        """
        of_turns = torch.zeros_like(self.rewards).index_add_(0, self.turn_of_token, penalties)
        return replace(self, rewards=self.rewards - of_turns)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Return fp32 rows of different lengths as one tensor, with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True) if rows else torch.zeros(0, 0)
