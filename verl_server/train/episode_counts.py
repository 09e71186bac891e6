"""`EpisodeCounts`: what a step's episodes say about its groups, its limits and its prompts, as sums of all ranks.

`rollout_report.report_rollout` makes them, and `watch.advisories` judges them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from verl_server.rollout.trajectory import StopReason, Trajectory

_CUT = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL)
"""Ends at a limit. A limit of time is not among them: it counts as a failure."""
_SHORTEST_CUT = 8
"""Tokens of an answer from which on its end at `max_new_tokens` is a cut. Games whose action is one token, or a few,
end every answer in this way."""


class EpisodeCounts(msgspec.Struct, kw_only=True):
    """Sums over the episodes of one rank, or of all ranks once they are added."""

    groups: int = 0
    """Groups with an episode that has a reward and a token to train on."""
    equal_rewards: list[float] = []
    """The reward of each group of `groups` in which all these rewards are equal."""
    lowest: float | None = None
    """Lowest reward of these episodes."""
    highest: float | None = None
    """Highest reward of these episodes."""
    truncated: int = 0
    """Episodes that ended at a limit of turns or tokens, or with an answer that `max_new_tokens` cut."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all turns."""
    reusable_tokens: int = 0
    """Number of `prompt_tokens` that were in an earlier prompt or answer of the episode, or in the first prompt of
    another episode of the group."""
    replayed: int = 0
    """Episodes that went on from the turns that an earlier start of the run recorded (`Trajectory.kept_turns`)."""
    ended_before: int = 0
    """Episodes that had ended in an earlier start."""
    replay_refused: int = 0
    """Episodes that began again, because the environment did not repeat the recorded answers."""

    @property
    def without_spread(self) -> int:
        """Number of `groups` in which all these rewards are equal."""
        return len(self.equal_rewards)

    @property
    def solved(self) -> int:
        """Number of `groups` in which all these rewards are the highest one."""
        return self._equal_to(self.highest)

    @property
    def unsolved(self) -> int:
        """Number of `groups` in which all these rewards are the lowest one."""
        return self._equal_to(self.lowest)

    def _equal_to(self, extreme: float | None) -> int:
        """Return the number of groups with this reward. It is 0 if all rewards are equal: none is high or low then."""
        if (
            extreme is None
            or self.lowest is None
            or self.highest is None
            or not has_spread([self.lowest, self.highest])
        ):
            return 0
        return sum(extreme is not None and not has_spread([reward, extreme]) for reward in self.equal_rewards)

    @classmethod
    def of(cls, episodes: Sequence[Sequence[Trajectory]]) -> EpisodeCounts:
        """Return the sums of `episodes`, each of which is its branches."""
        rewards = rewards_by_group(episodes)
        found = [reward for group in rewards.values() for reward in group]
        counts = cls(
            groups=len(rewards),
            equal_rewards=[group[0] for group in rewards.values() if not has_spread(group)],
            lowest=min(found, default=None),
            highest=max(found, default=None),
            truncated=sum(any(map(_is_cut, branches)) for branches in episodes),
        )
        for (kept, turns), number in Counter((b[0].kept_turns, len(b[0].turns)) for b in episodes).items():
            counts.replay_refused += number if kept == 0 else 0
            counts.ended_before += number if kept and kept == turns else 0
            counts.replayed += number if kept and kept < turns else 0
        first_prompts: set[tuple[int, tuple[int, ...]]] = set()
        for trajectory in (t for branches in episodes for t in branches):
            known = 0
            for turn in trajectory.turns:
                start, end = turn.action_span
                # A turn that branches share is in the loss mask of one of them.
                if start < end and trajectory.loss_mask[start]:
                    if not known:
                        first = (trajectory.task.group, tuple(trajectory.tokens[:start]))
                        known = start if first in first_prompts else 0
                        first_prompts.add(first)
                    counts.prompt_tokens += start
                    counts.reusable_tokens += known
                known = end
        return counts

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        lows = [low for low in (self.lowest, other.lowest) if low is not None]
        highs = [high for high in (self.highest, other.highest) if high is not None]
        return EpisodeCounts(
            groups=self.groups + other.groups,
            equal_rewards=self.equal_rewards + other.equal_rewards,
            lowest=min(lows, default=None),
            highest=max(highs, default=None),
            truncated=self.truncated + other.truncated,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            reusable_tokens=self.reusable_tokens + other.reusable_tokens,
            replayed=self.replayed + other.replayed,
            ended_before=self.ended_before + other.ended_before,
            replay_refused=self.replay_refused + other.replay_refused,
        )


def rewards_by_group(episodes: Sequence[Sequence[Trajectory]]) -> dict[int, list[float]]:
    """Return group -> rewards of its trainable episodes, of groups that have one. An episode is its branches."""
    rewards: dict[int, list[float]] = {}
    for branches in episodes:
        if (reward := branches[0].reward) is not None and any(t.is_trainable for t in branches):
            rewards.setdefault(branches[0].task.group, []).append(reward)
    return rewards


def has_spread(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group differ, so that a step learns from it."""
    return max(rewards) - min(rewards) >= 1e-9


def has_failed(t: Trajectory) -> bool:
    """Return True if an episode counts as failed: its error is not that of a regular end with a reward."""
    if t.error is None or t.stop_reason is None:
        return False
    return t.reward is None or not t.stop_reason.is_regular


def _is_cut(trajectory: Trajectory) -> bool:
    if trajectory.stop_reason in _CUT:
        return True
    return any(
        turn.finish_reason == "length" and turn.action_span[1] - turn.action_span[0] >= _SHORTEST_CUT
        for turn in trajectory.turns
    )
