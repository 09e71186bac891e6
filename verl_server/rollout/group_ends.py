"""`GroupEnds`: hands on each group of a rollout as soon as all of its episodes have ended.

`AgentLoop` and the trainer's `AgentGroups` tell it of ends. The trainer's journal takes the groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from verl_server.rollout.trajectory import Task, Trajectory


class GroupEnds:
    def __init__(self, tasks: Sequence[Task], on_group: Callable[[list[Trajectory], list[Trajectory]], None]) -> None:
        """`on_group` takes the trajectories of a group, in the order of its tasks, and those that others replaced."""
        self._tasks = tasks
        self._on_group = on_group
        self._open: dict[int, set[int]] = defaultdict(set)
        """Group -> places in `tasks` of its episodes that have not ended."""
        for place, task in enumerate(tasks):
            self._open[task.group].add(place)
        self._ended: dict[int, list[Trajectory]] = {}
        """Place in `tasks` -> the branches of its episode."""
        self._replaced: dict[int, list[Trajectory]] = defaultdict(list)

    def replaced(self, trajectories: Sequence[Trajectory]) -> None:
        """Note an episode in whose place another one plays."""
        self._replaced[trajectories[0].task.group].extend(trajectories)

    def ended(self, place: int, trajectories: Sequence[Trajectory]) -> None:
        """Note the end of the episode of a task."""
        group = self._tasks[place].group
        self._ended[place] = list(trajectories)
        self._open[group].discard(place)
        if not self._open[group]:
            places = [each for each, task in enumerate(self._tasks) if task.group == group]
            self._on_group([t for each in places for t in self._ended[each]], self._replaced[group])
