"""`Ancestors`: places the versions of earlier starts of a run on the line of versions of this start.

Every start makes versions of an incarnation of its own (`weight_version`). A start that continues from version 5 of an
earlier one has its versions up to 5, and not its later ones: their weights are lost. Groups that a lost version sampled
are still there (`journal`). Their distance from the trained weights is that through the common ancestor:

    4 - 5 - 6 - 7     start A; A continued until 7, and the checkpoint is of 5
         \\
          5 - 6       start B

From 7@A, it is two steps back to 5, and one step to 6@B. So 7@A is placed where 3 is: 5 - 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_server.train.checkpoints import Progress
from verl_server.weight_version import WeightVersion


@dataclass(frozen=True)
class Ancestors:
    forks: Mapping[str, int] = field(default_factory=dict)
    """Earlier incarnation -> number of its last version that this start has, too."""

    @classmethod
    def of(cls, progress: Progress) -> Ancestors:
        """Return the ancestors of a start that continues from a checkpoint. An old one has no incarnation: none."""
        if progress.incarnation is None:
            return cls()
        forks = {name: min(fork, progress.version) for name, fork in (progress.ancestors or {}).items()}
        return cls(forks | {progress.incarnation: progress.version})

    def with_branch(self, incarnation: str, base: WeightVersion | None) -> Ancestors:
        """Return these and a start that continued from `base`, itself, and that nobody continued.

        They stay as they are if the incarnation is known, or if that of `base` is not.
        """
        if incarnation in self.forks or base is None or base.incarnation not in self.forks:
            return self
        return Ancestors({**self.forks, incarnation: min(base.number, self.forks[base.incarnation])})

    def number(self, version: WeightVersion | None, own: str) -> int | None:
        """Return the place of a version on the line of incarnation `own`, which may be negative.

        Return None for a free label (None) and for weights that are not of this run.
        """
        if version is None or version.incarnation == own:
            return None if version is None else version.number
        fork = self.forks.get(version.incarnation)
        return None if fork is None else min(version.number, 2 * fork - version.number)

    def number_of(self, label: str, own: str) -> int | None:
        """Return the `number` of the version that a label names."""
        return self.number(WeightVersion.parse(label), own)
