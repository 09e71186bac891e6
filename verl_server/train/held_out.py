"""`HeldOut`: the tasks of an evaluation, which no step trains on.

They are the same in all runs and at all steps, so that their rewards can be compared. Seeds are a function of the task
and the number of its episode alone. `evaluation` plays them.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_server.rollout.trajectory import Task
from verl_server.train.mixture import Mixture
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
    mixture: Mixture | None = None
    """The environments of a mixture, which share the tasks equally. Each has the same held-out seeds, from the first
    one on."""

    @property
    def episodes(self) -> int:
        return self.tasks * self.samples

    def share(self, rank: int = 0, ranks: int = 1) -> list[Task]:
        """Return the tasks that a rank plays, all episodes of a task in a row."""
        return [self._task(task, sample) for task in range(rank, self.tasks, ranks) for sample in range(self.samples)]

    def _task(self, task: int, sample: int) -> Task:
        environments = [None] if self.mixture is None else [e.name for e in self.mixture.environments]
        count, place = divmod(task, len(environments))
        return Task(
            seed=HELD_OUT + count,
            group=HELD_OUT + task,
            episode_id=f"held-out-{task}-{sample}",
            sampling_seed=HELD_OUT * (sample + 1) + task,
            member=sample,
            environment=environments[place],
        )
