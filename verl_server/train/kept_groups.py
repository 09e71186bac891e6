"""`KeptGroups`: the groups in the journals of a run that a resumed run need not play again.

The checkpoint does not count them as done, and an earlier start played them. They are trained by the log-probabilities
that were recorded when they were sampled, which are right whatever weights sampled them. Whether a group is young
enough is up to the caller: `step_journal` needs the weights of its step, `async_grpo` has a largest age. Its age counts
from the oldest version that sampled one of its tokens (`ancestors`). Groups that had not finished are `open_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from verl_server.engine.rank_group import RankGroup
from verl_server.rollout.agent_loop import Rollout
from verl_server.train.ancestors import Ancestors
from verl_server.train.checkpoints import Progress
from verl_server.train.journal import FinishedGroup, read_groups
from verl_server.train.journal_records import GroupHead
from verl_server.train.open_groups import OpenGroups
from verl_server.train.turn_journal import read_turns
from verl_server.weight_version import WeightVersion


class KeptGroup(NamedTuple):
    start: int
    """Place of its oldest version on the line of this start's versions."""
    rollout: Rollout


@dataclass(frozen=True)
class KeptGroups:
    ancestors: Ancestors = field(default_factory=Ancestors)
    """Those of this start, with the starts that played the groups."""
    groups: dict[int, KeptGroup] = field(default_factory=dict)
    """Number -> the group; the youngest one if several starts played it."""
    open: OpenGroups = field(default_factory=OpenGroups)
    """Those that had not finished. Empty unless `replays`."""

    @classmethod
    def read(
        cls, folder: Path, ancestors: Ancestors, is_wanted: Callable[[GroupHead], bool], *, replays: bool = False
    ) -> KeptGroups:
        """Return the groups of a run's folder whose heads `is_wanted`. `ancestors` are those of this start.

        With `replays`, groups that had not finished are read, too.
        Raise BadRequestError, which names the file, if a journal is damaged.
        """
        groups: dict[int, KeptGroup] = {}
        for found in read_groups(folder, is_wanted):
            version = WeightVersion.parse(found.version)
            if version is None:
                continue
            ancestors = ancestors.with_branch(version.incarnation, WeightVersion.parse(found.base))
            start = _start(found, version, ancestors)
            if start is None or (found.number in groups and groups[found.number].start > start):
                continue
            groups[found.number] = KeptGroup(start, found.rollout)
        opened = OpenGroups.of(read_turns(folder, is_wanted) if replays else [], ancestors, groups)
        return cls(opened.ancestors, groups, opened)

    @classmethod
    def on_first_rank(
        cls,
        ranks: RankGroup,
        folder: Path,
        progress: Progress,
        is_wanted: Callable[[GroupHead], bool],
        *,
        replays: bool = False,
    ) -> KeptGroups:
        """Return the groups on rank 0, and the ancestors on all ranks, which call it together; see `read`."""
        kept = cls()

        def read(_: list[bytes]) -> dict[str, int]:
            nonlocal kept
            kept = cls.read(folder, Ancestors.of(progress), is_wanted, replays=replays)
            return dict(kept.ancestors.forks)

        forks = ranks.call("KeptGroups", read)
        return cls(Ancestors(forks), kept.groups, kept.open)

    def take(self, number: int) -> KeptGroup | None:
        """Return a group, and forget it. None: it must be played."""
        return self.groups.pop(number, None)


def _start(group: FinishedGroup, began: WeightVersion, ancestors: Ancestors) -> int | None:
    """Return the place of the oldest version of a group. None: the weights with which it began are not of this run.

    A token whose version is unknown is no matter here: its episode is left out when the group is trained.
    """
    labels = {label for trajectory in group.rollout.trajectories for label in trajectory.weight_versions if label}
    first = ancestors.number(began, "")
    numbers = [number for label in labels if (number := ancestors.number_of(label, "")) is not None]
    return None if first is None else min([first, *numbers])


def relabel(rollouts: Iterable[Rollout], ancestors: Ancestors, version: WeightVersion) -> None:
    """Label the tokens of the weights `version` as this start labels them. Those of other weights keep their labels."""
    for trajectory in (t for rollout in rollouts for t in (*rollout.trajectories, *rollout.replaced)):
        trajectory.weight_versions = relabelled(trajectory.weight_versions, ancestors, version)


def relabelled(labels: Iterable[str], ancestors: Ancestors, version: WeightVersion) -> list[str]:
    """Return the labels of tokens: that of this start for the weights `version`, others as they are."""
    return [
        str(version) if label and ancestors.number_of(label, version.incarnation) == version.number else label
        for label in labels
    ]
