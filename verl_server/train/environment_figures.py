"""The sums over the episodes of each environment of a mixture, which ranks merge, and the figures of a step from them.

`rollout_report` and `evaluation` make the sums, `metrics` and the record of an evaluation take the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from verl_server.rollout.trajectory import Trajectory, by_episode, is_unsampled
from verl_server.train.episode_counts import has_failed, has_spread, rewards_by_group
from verl_server.train.mixture import Mixture
from verl_server.watch.run_records import HeldOutFigures


@dataclass
class EnvironmentFigures:
    """The figures of one environment in a step, over all ranks. Each is as the field of the whole step."""

    groups: int
    """Groups that the step used."""
    groups_without_spread: int
    """Number of `groups` with a trainable episode in which all trainable episodes have the same reward."""
    episodes: int
    """Number of episodes, without those that others replaced."""
    failed: int
    """Episodes that failed and that no other one replaced. Those of the policy have a reward."""
    replaced: int
    """Episodes that the infrastructure ended and others replaced."""
    reward: float | None
    """Mean reward of the episodes that have a reward and a sampled token."""
    success: float | None
    """Share of these episodes whose reward is at least the environment's `success`, or `--eval-success`."""
    turns: float | None
    """Mean number of turns of an episode. None without an episode."""
    sampled_tokens: int
    """Number of sampled tokens."""


class EnvironmentSums(msgspec.Struct, kw_only=True):
    """Sums over the episodes of an environment, on one rank, or on all ranks once they are added."""

    groups: int = 0
    without_spread: int = 0
    episodes: int = 0
    failed: int = 0
    replaced: int = 0
    scored: int = 0
    """Episodes that have a reward and a sampled token."""
    solved: int = 0
    """Scored episodes that succeeded."""
    reward: float = 0.0
    """Sum of the rewards of the scored episodes."""
    turns: int = 0
    sampled_tokens: int = 0

    @classmethod
    def of(
        cls, episodes: Sequence[Sequence[Trajectory]], replaced: Sequence[Sequence[Trajectory]], success: float
    ) -> EnvironmentSums:
        """Return the sums of episodes, each of which is its branches, and of those that others replaced."""
        trajectories = [t for branches in episodes for t in branches]
        rewards = [b[0].reward for b in episodes if b[0].reward is not None and not is_unsampled(b)]
        groups = rewards_by_group(episodes).values()
        return cls(
            groups=len({branches[0].task.group for branches in episodes}),
            without_spread=sum(not has_spread(group) for group in groups),
            episodes=len(episodes),
            failed=sum(has_failed(branches[0]) for branches in episodes),
            replaced=len(replaced),
            scored=len(rewards),
            solved=sum(reward >= success for reward in rewards),
            reward=sum(rewards),
            turns=sum(len(t.turns) for t in trajectories),
            sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        )

    def __add__(self, other: EnvironmentSums) -> EnvironmentSums:
        return EnvironmentSums(**{n: getattr(self, n) + getattr(other, n) for n in self.__struct_fields__})

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.scored if self.scored else None

    @property
    def success(self) -> float | None:
        return self.solved / self.scored if self.scored else None

    def figures(self) -> EnvironmentFigures:
        """Return the figures of a step."""
        return EnvironmentFigures(
            groups=self.groups,
            groups_without_spread=self.without_spread,
            episodes=self.episodes,
            failed=self.failed,
            replaced=self.replaced,
            reward=self.mean_reward,
            success=self.success,
            turns=self.turns / self.episodes if self.episodes else None,
            sampled_tokens=self.sampled_tokens,
        )

    def held_out_figures(self) -> HeldOutFigures:
        """Return the figures of an evaluation."""
        return HeldOutFigures(
            episodes=self.scored,
            failed=self.episodes - self.scored,
            reward=self.mean_reward,
            success=self.success,
        )


def sums_by_environment(
    mixture: Mixture | None, trajectories: Sequence[Trajectory], replaced: Sequence[Trajectory]
) -> dict[str, EnvironmentSums]:
    """Return environment -> sums of its trajectories, in the order of a `Mixture.judged`; {} without a mixture."""
    if mixture is None:
        return {}
    played, lost = by_episode(trajectories), by_episode(replaced)
    return {
        environment.name: EnvironmentSums.of(
            [branches for branches in played if branches[0].task.environment == environment.name],
            [branches for branches in lost if branches[0].task.environment == environment.name],
            math.inf if environment.success is None else environment.success,
        )
        for environment in mixture.environments
    }


def added(sums: Sequence[dict[str, EnvironmentSums]]) -> dict[str, EnvironmentSums]:
    """Return environment -> sums over all ranks."""
    found: dict[str, EnvironmentSums] = {}
    for ranks in sums:
        for name, own in ranks.items():
            found[name] = found[name] + own if name in found else own
    return found


def mean_over_mixture(mixture: Mixture, values: dict[str, float | None]) -> float | None:
    """Return the mean of the environments' values, weighed with their weights; None if one has no value."""
    shares = mixture.shares
    known = {name: value for name, value in values.items() if value is not None}
    if known.keys() != shares.keys():
        return None
    return sum(shares[name] * value for name, value in known.items()) / sum(shares.values())
