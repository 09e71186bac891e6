"""`TaskOrder`: which groups of a run's tasks the steps of a synchronous run play.

The groups of a run have numbers, in the order of the tasks. A step plays the next ones: `groups` of them, and further
ones in place of those without spread (`refill`). So a step begins where the step before it ended. `grpo` asks for its
tasks and stores the position in checkpoints; `step_journal` names the groups in its journal by these numbers.
"""

from __future__ import annotations

from verl_server.train.checkpoints import Progress


class TaskOrder:
    def __init__(self, groups: int) -> None:
        """Take `groups`, the number of groups of a step that has no further ones, over all ranks."""
        self._groups = groups
        self._first = {0: 0}
        """Step -> number of its first group, of the present step, and of the next one once the present one has played.
        """

    def resume(self, progress: Progress) -> None:
        """Continue from a checkpoint."""
        self._first = {progress.next_step: progress.first_group(self._groups)}

    def first(self, step: int) -> int:
        """Return the number of the first group of `step`: the present step, or the next one."""
        return self._first[step]

    def played(self, step: int, groups: int) -> None:
        """Note that all groups of `step` have ended: `groups` of them, over all ranks."""
        first = self._first[step]
        self._first = {step: first, step + 1: first + groups}

    def stored(self, next_step: int) -> int | None:
        """Return `Progress.next_group` of a checkpoint. None: each step before has played `groups` groups."""
        first = self._first[next_step]
        return None if first == next_step * self._groups else first
