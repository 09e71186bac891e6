"""`HeldOut`: the tasks of an evaluation, which no step trains on.

They are the same in all runs and at all steps, so that their rewards can be compared. Seeds are a function of the task
and the number of its episode alone. `evaluation` plays them.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_server.rollout.trajectory import Task
from verl_server.watch.run_records import HELD_OUT as HELD_OUT


@dataclass(frozen=True)
class HeldOut:
    tasks: int
    """Number of tasks."""
    samples: int
    """Episodes of each task."""
    timeout: float
    """Most seconds of an evaluation."""
    success: float
    """Least reward of an episode that succeeded."""

    @property
    def episodes(self) -> int:
        return self.tasks * self.samples

    def share(self, rank: int = 0, ranks: int = 1) -> list[Task]:
        """Return the tasks that a rank plays, all episodes of a task in a row."""
        return [self._task(task, sample) for task in range(rank, self.tasks, ranks) for sample in range(self.samples)]

    def _task(self, task: int, sample: int) -> Task:
        number = HELD_OUT + task
        draw = HELD_OUT * (sample + 1) + task
        name = f"held-out-{task}-{sample}"
        return Task(seed=number, group=number, episode_id=name, sampling_seed=draw, member=sample)
