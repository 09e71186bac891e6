"""`describe_ages`: how old the episodes of a step are, and over how many versions each of them spans.

The age of an episode is the number of the version that is trained, minus that of the version that sampled the episode's
oldest token. The labels of the tokens decide, which the server writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from verl_server.rollout.trajectory import Trajectory, by_episode
from verl_server.weight_version import WeightVersion


class Ages(msgspec.Struct, kw_only=True):
    """The ages of a step's episodes. Episodes without a sampled token, or with labels of no order, are left out."""

    ages: dict[str, int] = {}
    """Age -> number of episodes."""
    spans: dict[str, int] = {}
    """Number of versions that sampled tokens of one episode -> number of episodes."""

    @property
    def mean(self) -> float | None:
        count = sum(self.ages.values())
        return sum(int(age) * episodes for age, episodes in self.ages.items()) / count if count else None

    @property
    def largest(self) -> int | None:
        return max(map(int, self.ages), default=None)


def describe_ages(groups: Sequence[Sequence[Trajectory]], trained: WeightVersion) -> Ages:
    """Return the ages of the episodes of `groups` when the weights `trained` are trained on them."""
    ages, spans = Counter[str](), Counter[str]()
    for branches in (episode for group in groups for episode in by_episode(group)):
        labels = {label for branch in branches for label in branch.weight_versions if label}
        versions = [WeightVersion.parse(label) for label in labels]
        numbers = [v.number for v in versions if v is not None and v.incarnation == trained.incarnation]
        if numbers and len(numbers) == len(labels):
            ages[str(trained.number - min(numbers))] += 1
            spans[str(len(numbers))] += 1
    return Ages(ages=_sorted(ages), spans=_sorted(spans))


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))
