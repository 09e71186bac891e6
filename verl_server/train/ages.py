"""How old the episodes of a step are, and over how many versions each of them spans (`describe_ages`).

The age of an episode is the number of the version that is trained, minus that of the version that sampled the episode's
oldest token. The labels of the tokens decide, which the server writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from verl_server.rollout.trajectory import Trajectory, by_episode
from verl_server.train.ancestors import Ancestors
from verl_server.train.metrics import StepMetrics
from verl_server.weight_version import WeightVersion

Number = TypeVar("Number", int, float)


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


def describe_ages(
    groups: Sequence[Sequence[Trajectory]], trained: WeightVersion, ancestors: Ancestors | None = None
) -> Ages:
    """Return the ages of the episodes of `groups` when the weights `trained` are trained on them.

    `ancestors` place the versions of earlier starts of the run.
    """
    ancestors = ancestors or Ancestors()
    ages, spans = Counter[str](), Counter[str]()
    for branches in (episode for group in groups for episode in by_episode(group)):
        labels = {label for branch in branches for label in branch.weight_versions if label}
        numbers = [ancestors.number_of(label, trained.incarnation) for label in labels]
        known = [number for number in numbers if number is not None]
        if known and len(known) == len(labels):
            ages[str(trained.number - min(known))] += 1
            spans[str(len(known))] += 1
    return Ages(ages=_sorted(ages), spans=_sorted(spans))


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))


def describe_history(history: Sequence[StepMetrics], max_staleness: int) -> dict[str, Any]:
    """Return the ages of all steps, who waited for what, and the mean idle shares, as `asynchronous` of summary.json.

    `max_staleness` is the largest age that the run permitted.
    """
    seconds = [m.rollout_seconds + m.train_seconds + m.sync_seconds for m in history]
    idle = {}
    for name in sorted({name for m in history for name in m.idle}):
        known = [(m.idle[name], weight) for m, weight in zip(history, seconds, strict=True) if name in m.idle]
        idle[name] = sum(share * weight for share, weight in known) / max(1e-9, sum(weight for _, weight in known))
    return {
        "max_staleness": max_staleness,
        "ages": _totals(m.ages for m in history),
        "version_spans": _totals(m.version_spans for m in history),
        "waits": _totals(m.waits for m in history),
        "idle": idle,
    }


def _totals(counts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    """Return name -> sum of its numbers. Names that are numbers are in their order."""
    found: dict[str, Number] = {}
    for count in counts:
        for name, number in count.items():
            found[name] = found[name] + number if name in found else number
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0]) if item[0].isdigit() else (0, item[0])))
