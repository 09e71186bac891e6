"""`StepLabels`: makes the version labels of a trainer's pushes from verl's steps. `step_of` reads the step back.

A job that was resumed repeats steps, so its labels have another incarnation (`weight_version`).
"""

from __future__ import annotations

from verl_server.weight_version import WeightVersion


class StepLabels:
    """Labels of one job's pushes, equal on all trainer ranks, which push in the same order."""

    def __init__(self, incarnation: str) -> None:
        """`incarnation` is equal on all ranks (`TrainerRanks.incarnation`)."""
        self._incarnation = incarnation
        self._num_pushes = 0

    def next_label(self, global_steps: int | None) -> str:
        """Return the label of the next push. Without a step, it is a free label that no other push has."""
        self._num_pushes += 1
        if global_steps is None:
            # A push without a label gets one of the server, whose number would be taken for a step.
            return f"unnumbered-{self._num_pushes}@{self._incarnation}"
        return str(WeightVersion(global_steps, self._incarnation))


def step_of(label: str) -> int | None:
    """Return the trainer's step in a version label, or None for a free label."""
    version = WeightVersion.parse(label)
    return None if version is None else version.number
