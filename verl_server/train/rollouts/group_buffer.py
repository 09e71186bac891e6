"""`GroupBuffer`: which groups play, which ones the next step trains, and how old their episodes may become.

`async_grpo` asks it on rank 0. It only decides; the rollout process plays.

*Age* of a group: the version that is trained minus the version that was served when the group began to play. G is the
number of groups of a step, K = `max_staleness`.

- Permits: a group starts only while fewer than G x (K + 1) groups are started and not done. A group is done when the
  step that used it has ended, with its push.
- Order: a step uses the finished groups that began first.
- Deadline: a group must be used before its age exceeds K. A step waits as long as its G groups would leave more groups
  due at a later version than the steps up to it can use. The permits guarantee that G groups always suffice.

Groups that an earlier start of the run played are kept under the same rules (`keep`).

So no group is thrown away, and slow tasks are trained like fast ones. To throw away what comes too late is an option.
The rule is that of tinker-cookbook (pull request 822); AReaL (Fu et al. 2025, arXiv 2505.24298) bounds the same number
of samples, and lets groups wait in a queue without a deadline.

With a refill (`train.refill`), a group without spread is left out when it has finished, and another one starts. Each
step allows so many. Groups play ahead for K further steps, so as many as K + 1 steps allow may be left out at once.
Beyond it, a step uses groups without spread like others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from verl_server.train.journal_records import GroupHead
from verl_server.weight_version import WeightVersion

T = TypeVar("T")

Wait = Literal["episodes", "deadline"]
"""The cause of a wait: too few groups have finished, or one that has not finished must be in this step."""


@dataclass(eq=False)
class Group(Generic[T]):
    """A group that has started and is not done."""

    number: int
    """Number of the group in the run, from 0 on."""
    start: int | None = None
    """Number of the version that was served when the group began to play. None: it has not begun. For a group that an
    earlier start of the run played, it is the place of its oldest version (`ancestors`)."""
    step: int = 0
    """Step of the trainer in which the group began to play."""
    result: T | None = None
    """Set when all episodes of the group have ended."""
    is_kept: bool = False
    """True if an earlier start of the run played the group."""
    oldest: int | None = None
    """For a group whose episodes go on from an earlier start of the run: the place of their oldest version."""
    lacks_spread: bool = False
    """True if the group has finished, and a step would learn nothing from it."""
    is_left_out: bool = False
    """True if others replace the group because it lacks spread."""


class GroupBuffer(Generic[T]):
    def __init__(
        self,
        groups: int,
        max_staleness: int,
        *,
        drops: bool = False,
        refill: int = 0,
        lacks_spread: Callable[[T], bool] = lambda result: False,
    ) -> None:
        """Take the groups of a step and the largest age.

        With `drops`, no step waits for a deadline, and `take_stale` removes what is too old. Each step allows to leave
        out `refill` groups whose result `lacks_spread`.
        """
        self.groups = groups
        self.max_staleness = max_staleness
        self.next_group = 0
        """The first group that has not started."""
        self.left_out: list[Group[T]] = []
        """The groups without spread that others replace. They get their fate with the next batch."""
        self._drops = drops
        self._refill = refill
        self._refills_left = refill * (max_staleness + 1)
        self._lacks_spread = lacks_spread
        self._again: list[int] = []
        self._started: dict[int, Group[T]] = {}
        self._fates: dict[int, int] = {}
        """Number of a group that has its fate -> the step of its event. Those of earlier steps are forgotten."""
        self._saved: list[tuple[int, int, frozenset[int]]] = []
        """Version, `next_group` and undone groups of the last checkpoint, and then of one that is being written."""

    def resume(self, next_group: int, undone: Iterable[int], version: int = 0) -> None:
        """Continue from a checkpoint of `version`: groups `undone` start first, then those from `next_group` on."""
        self.next_group, self._again = next_group, sorted(undone)
        self.note_saving(version, next_group, self._again)
        self.note_saved()

    @property
    def undone(self) -> list[int]:
        """Numbers of all groups that have started, here or before a resume, and have no fate."""
        return sorted([*self._started, *self._again, *(group.number for group in self.left_out)])

    def undone_at(self, next_step: int) -> list[int]:
        """Return the numbers of the started groups whose fate is not of a step before `next_step`.

        A run that continues with this step gives them a fate, because it has lost the events of later steps.
        """
        known = {*self.undone, *self._fates}
        return sorted(number for number in known if self._fates.get(number, next_step) >= next_step)

    def note_saving(self, version: int, next_group: int, undone: Iterable[int]) -> None:
        """Note what a checkpoint says that is being written. The one before it is still the last one."""
        self._saved.append((version, next_group, frozenset(undone)))

    def note_saved(self) -> None:
        """Note that the newest checkpoint is on the disk."""
        del self._saved[:-1]

    def needed(self, next_step: int, incarnation: str) -> Callable[[GroupHead], bool]:
        """Return a function that says if a run could use a group that has finished. Any thread may call it.

        The run would continue with `next_step`, from the last checkpoint, or from the one that is being written.
        `incarnation` is that of this start.
        """
        live, next_group = frozenset(self.undone_at(next_step)), self.next_group
        checkpoints, most = tuple(self._saved), self.max_staleness

        def is_needed(head: GroupHead) -> bool:
            if head.number in live or head.number >= next_group:
                return True
            began = WeightVersion.parse(head.version)
            return any(
                (head.number >= first or head.number in undone)
                and (began is None or began.incarnation != incarnation or began.number <= version + most)
                for version, first, undone in checkpoints
            )

        return is_needed

    def start(self, steps_left: int) -> list[Group[T]]:
        """Start the groups that the permits allow, and return them. They begin to play when there is room.

        No more groups play than the steps that are left, this one included, can use.
        """
        started = []
        while len(self._started) < self.groups * min(self.max_staleness + 1, steps_left):
            if self._again:
                number = self._again.pop(0)
            else:
                number, self.next_group = self.next_group, self.next_group + 1
            self._started[number] = Group(number)
            started.append(self._started[number])
        return started

    def begin(self, number: int, version: int, step: int) -> None:
        """Note that a group began to play while `version` was served. One that begins again is as old as at last."""
        group = self._started.get(number)
        if group is not None and group.result is None:
            group.start = version if group.oldest is None else min(group.oldest, version)
            group.step = step

    def finish(self, number: int, result: T) -> None:
        """Note that a group has finished. A group that was dropped, or that had finished before, is ignored."""
        group = self._started.get(number)
        if group is not None and group.result is None:
            group.result, group.lacks_spread = result, self._lacks_spread(result)

    def keep(self, group: Group[T], start: int, result: T, version: int, step: int) -> bool:
        """Finish a started group with what an earlier start of the run played. `start` is `Group.start`.

        Return False, and leave the group to be played, if it or another one would become too old: too many old groups
        may be due at once.
        """
        if not self._is_in_time(group, start, version):
            return False
        group.step, group.result, group.is_kept = step, result, True
        group.lacks_spread = self._lacks_spread(result)
        return True

    def go_on(self, group: Group[T], oldest: int, version: int) -> bool:
        """Note that a started group goes on from an earlier start of the run, as old as `oldest`.

        Return False, and leave the group to be played from its tasks, in the cases of `keep`.
        """
        if not self._is_in_time(group, oldest, version):
            return False
        group.oldest = oldest
        return True

    def _is_in_time(self, group: Group[T], start: int, version: int) -> bool:
        """Set the start of a group, and return True if the steps from `version` on can use all groups in time."""
        group.start = start
        due = sorted(map(self._due, self._started.values()))
        is_late = any(last < version + place // self.groups for place, last in enumerate(due))
        if self._due(group) < version or (is_late and not self._drops):
            group.start = None
            return False
        return True

    def leave_out(self) -> None:
        """Leave out the finished groups without spread, the oldest first, so that others can start in their places."""
        flat = [group for group in self._in_order() if group.lacks_spread and group.number not in self._fates]
        flat = flat[: self._refills_left]
        self._refills_left -= len(flat)
        self.left_out += flat
        self.done(flat)
        for group in flat:
            group.is_left_out = True

    def batch(self, version: int) -> list[Group[T]] | Wait:
        """Return the groups that the step at `version` uses, or what it waits for."""
        batch = [group for group in self._in_order() if group.result is not None][: self.groups]
        if len(batch) < self.groups:
            return "episodes"
        return batch if self._drops or self._leaves_room(batch, version) else "deadline"

    def use(self, batch: Sequence[Group[T]], step: int) -> None:
        """Note that `step` trains on `batch`, and replaces `left_out`. The batch is done when the step has ended."""
        self._fates = {number: fate for number, fate in self._fates.items() if fate >= step}
        self._fates |= {group.number: step for group in (*batch, *self.left_out)}
        self.left_out = []
        self._refills_left = min(self._refills_left + self._refill, self._refill * (self.max_staleness + 1))

    def done(self, batch: Sequence[Group[T]]) -> None:
        """Note that the step which used `batch` has ended, and its push. Those that it left out were done before."""
        for group in batch:
            if not group.is_left_out:
                del self._started[group.number]

    def take_stale(self, version: int, step: int = 0) -> list[Group[T]]:
        """Remove the groups whose age exceeds the largest one at `version`, and return them. Only with `drops`.

        `step` is the one that begins, or waits.
        """
        stale = [group for group in self._in_order() if self._drops and self._due(group) < version]
        self._fates |= {group.number: step for group in stale}
        self.done(stale)
        return stale

    def describe(self) -> str:
        """Return how many groups have finished, play, and have not begun, as text."""
        groups = self._started.values()
        finished = sum(group.result is not None for group in groups)
        playing = sum(group.result is None and group.start is not None for group in groups)
        waiting = len(groups) - finished - playing
        left_out = f", {len(self.left_out)} without spread were replaced" if self.left_out else ""
        return f"{finished} groups have finished, {playing} play, {waiting} wait for a place{left_out}"

    def _in_order(self) -> list[Group[T]]:
        return sorted(self._started.values(), key=lambda group: (self._due(group), group.number))

    def _due(self, group: Group[T]) -> float:
        """Return the last version at which a step may use the group."""
        return math.inf if group.start is None else group.start + self.max_staleness

    def _leaves_room(self, batch: Sequence[Group[T]], version: int) -> bool:
        """Return True if the later steps can use the other groups before their deadlines."""
        left = [group for group in self._started.values() if group not in batch]
        for last in range(version, version + self.max_staleness + 1):
            due = sum(self._due(group) <= last for group in left)
            if due > self.groups * (last - version):
                return False
        return True
