"""`StepJournal`: the finished groups of a synchronous run on one rank.

`grpo` plays the groups of a step under the step's weights, and a resumed run has no other weights. So it keeps groups
of the step with which it continues, if exactly the weights of the checkpoint sampled them, and plays the others. With
`--replay-actions`, the episodes of groups that had not finished go on under the same condition (`recording`). What it
trains is then what the run would have trained without the interruption, bit for bit.

Groups are named by their numbers, and each rank reads the journals of all ranks. So a run may continue on another
number of ranks. Only groups in journals that the rank cannot see, on another machine, are played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.recorded_turns import EpisodeProgress, RecordedEpisode, Recording
from verl_server.rollout.trajectory import Task, Trajectory
from verl_server.train.ancestors import Ancestors
from verl_server.train.checkpoints import Progress
from verl_server.train.journal import GroupJournal
from verl_server.train.journal_records import GroupHead
from verl_server.train.kept_groups import KeptGroups, relabel, relabelled
from verl_server.train.task_order import TaskOrder
from verl_server.weight_version import WeightVersion


class StepJournal:
    def __init__(self, order: TaskOrder, journal: GroupJournal | None = None) -> None:
        """Take `order`, which knows the numbers of a step's groups. Without `journal`, nothing is written."""
        self.ancestors = Ancestors()
        """The earlier starts of the run."""
        self._order = order
        self._journal = journal
        self._kept = KeptGroups()
        self._saved_steps: list[int] = []
        """Step with which a run continues from the last checkpoint, and then from one that is being written."""

    def resume(self, folder: Path, progress: Progress) -> None:
        """Read the groups of the step with which a run continues. Raise BadRequestError if a journal is damaged.

        A later step that is lost may have played groups of the same numbers, because it began elsewhere.
        """
        self.ancestors = Ancestors.of(progress)
        step = progress.next_step
        self._saved_steps = [step]
        replays = self._journal is not None and self._journal.records_turns
        self._kept = KeptGroups.read(folder, self.ancestors, lambda head: head.step == step, replays=replays)
        if self._journal is not None:
            self._journal.base = progress.label
            self._journal.go_on(self._kept.open.plays)

    def take(
        self,
        tasks: Sequence[Task],
        step: int,
        version: WeightVersion,
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> dict[int, Rollout]:
        """Return group -> its episodes of the groups of `tasks` that need not be played in `step`.

        `on_finish` is called with each of their trajectories.
        """
        first = self._order.first(step)
        found = {group: self._kept.take(first + group) for group in {task.group for task in tasks}}
        kept = {group: k.rollout for group, k in sorted(found.items()) if k is not None and k.start == version.number}
        relabel(kept.values(), self._kept.ancestors, version)
        for trajectory in (t for rollout in kept.values() for t in (*rollout.replaced, *rollout.trajectories)):
            if on_finish is not None:
                on_finish(trajectory)
        return kept

    def writer(self, step: int, version: WeightVersion) -> Callable[[Rollout], None] | None:
        """Return what takes each group of `step` that has finished."""
        if (journal := self._journal) is None:
            return None
        first = self._order.first(step)

        def write(rollout: Rollout) -> None:
            journal.put(first + rollout.trajectories[0].task.group, str(version), step, rollout)

        return write

    def recording(self, tasks: Sequence[Task], step: int, version: WeightVersion) -> Recording | None:
        """Return what takes the turns of `tasks` in `step`, and has the episodes that go on from an earlier start.

        None: turns are not recorded. Episodes go on that exactly the weights `version` have sampled.
        """
        journal, first = self._journal, self._order.first(step)
        if journal is None or not journal.records_turns:
            return None
        earlier: dict[tuple[int, int], RecordedEpisode] = {}
        for group in {task.group for task in tasks}:
            found = self._kept.open.take(first + group, version.number)
            for episode in found.episodes if found is not None else []:
                self._relabel(episode, version)
                earlier[group, episode.member] = episode

        def record(group: int, progress: EpisodeProgress) -> None:
            journal.progress(first + group, str(version), step, progress)

        return Recording(record, earlier)

    def _relabel(self, episode: RecordedEpisode, version: WeightVersion) -> None:
        for turn in episode.turns:
            turn.weight_versions = relabelled(turn.weight_versions, self._kept.ancestors, version)
        if (ended := episode.ended) is not None:
            ended.weight_versions = relabelled(ended.weight_versions, self._kept.ancestors, version)

    def step_ended(self, next_step: int) -> None:
        """Remove the groups of which no checkpoint would make use any more."""
        steps = {*self._saved_steps, next_step}
        self._keep(lambda head: head.step in steps, at_once=False)

    def saving(self, next_step: int) -> None:
        """Note that the checkpoint of `next_step` is being written. The one before it is still the last one."""
        self._saved_steps.append(next_step)

    def saved(self, next_step: int) -> None:
        """Remove the groups that the checkpoint of `next_step`, which is on the disk, counts as done."""
        self._saved_steps = [next_step]
        self._keep(lambda head: head.step >= next_step, at_once=True)

    def _keep(self, is_needed: Callable[[GroupHead], bool], at_once: bool) -> None:
        if self._journal is not None:
            self._journal.keep(is_needed, at_once=at_once)


def joined(played: Rollout | None, kept: dict[int, Rollout]) -> Rollout:
    """Return the episodes of a round in the order of its tasks, which is that of the groups."""
    parts = [*kept.values()] if played is None else [played, *kept.values()]

    def in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
        return sorted(trajectories, key=lambda trajectory: trajectory.task.group)  # stable within a group

    return Rollout(
        trajectories=in_order([t for part in parts for t in part.trajectories]),
        replaced=[t for part in parts for t in part.replaced],
        seconds=max((part.seconds for part in parts), default=0.0),
    )
