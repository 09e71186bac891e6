"""Refill (`--grpo.refill`): further groups play in place of those without spread.

All episodes of a group with equal rewards have the advantage 0, so a step learns nothing from the group, and steps
shrink as the policy solves more of its tasks. With a refill, the next groups in the order of the tasks play in its
place, until the step has as many groups with spread as it wants, or has reached its bound. This is the dynamic
sampling of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2). The bound counts rounds, as `max_num_gen_batches` of
verl does: a synchronous step waits for the slowest episode of each round.

`grpo` plays `Round`s and joins them. `async_grpo` has no rounds: its `GroupBuffer` leaves out each group that
`lacks_spread`, for each step at most `refill` times `groups`. A group in which no episode has a reward is not replaced,
because the infrastructure ended it, and would end the next one as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import by_episode
from verl_server.train.batches import Sample
from verl_server.train.episode_counts import has_spread, rewards_by_group
from verl_server.train.rollout_report import RolloutReport, merge_reports


class Round(NamedTuple):
    """The groups that a step plays at one time, before it knows whether it needs further ones."""

    groups: int
    """Number of the groups, over all ranks."""
    rollout: Rollout
    """The episodes of this rank."""
    samples: list[Sample]
    """The samples that this rank trains."""
    report: RolloutReport
    """About the episodes of all ranks."""


def share(groups: range, rank: int, ranks: int) -> range:
    """Return the groups of a round that a rank plays: about equally many as each other rank, in a row."""
    return groups[len(groups) * rank // ranks : len(groups) * (rank + 1) // ranks]


def join_rounds(rounds: Sequence[Round]) -> Round:
    """Return all rounds of a step as one. Its seconds are the sum of those of the rounds."""
    report = merge_reports([each.report for each in rounds])
    report.seconds = sum(each.report.seconds for each in rounds)
    report.refilled_groups = sum(each.groups for each in rounds[1:])
    rollout = Rollout(
        trajectories=[trajectory for each in rounds for trajectory in each.rollout.trajectories],
        replaced=[trajectory for each in rounds for trajectory in each.rollout.replaced],
        seconds=sum(each.rollout.seconds for each in rounds),
    )
    samples = [sample for each in rounds for sample in each.samples]
    return Round(sum(each.groups for each in rounds), rollout, samples, report)


def lacks_spread(rollout: Rollout) -> bool:
    """Return True if the rewards of a group are all equal. False if it has no episode to train on."""
    return any(not has_spread(rewards) for rewards in rewards_by_group(by_episode(rollout.trajectories)).values())
