"""The metrics that an agent's own code computed beside the reward, as sums that ranks merge, and their means.

Environments of verifiers have them (`Trajectory.metrics`). `rollout_report` makes the sums; the metrics of a step and
the record of an evaluation take the means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from verl_server.rollout.trajectory import Trajectory, is_unsampled


class MetricSum(msgspec.Struct):
    """The sum of a metric over the episodes that have it and a sampled token."""

    total: float = 0.0
    episodes: int = 0

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(self.total + other.total, self.episodes + other.episodes)


def metric_sums(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, MetricSum]:
    """Return name -> sum over `episodes`, each of which is its branches. Unsampled episodes count in no sum."""
    sampled = [branches[0] for branches in episodes if not is_unsampled(branches)]
    return merge_sums([{name: MetricSum(value, 1) for name, value in first.metrics.items()} for first in sampled])


def merge_sums(parts: Sequence[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Return name -> sum over all parts, in the order of the names."""
    found: dict[str, MetricSum] = {}
    for part in parts:
        for name, own in part.items():
            found[name] = found.get(name, MetricSum()) + own
    return dict(sorted(found.items()))


def metric_means(sums: Mapping[str, MetricSum]) -> dict[str, float]:
    """Return name -> mean over the episodes that have the metric."""
    return {name: own.total / own.episodes for name, own in sums.items()}
