"""`EnvironmentDraw`: which environment of a mixture a group of the run plays, and which of its tasks.

Both are functions of the number of the group in the run. So they depend neither on the number of ranks, nor on resumed
starts, nor on the order in which groups of an asynchronous run finish. `run_tasks` makes the tasks of it.

The order is that of a proportionate schedule (Baruah, Cohen, Plaxton, Varvel 1996, "Proportionate progress: a notion of
fairness in resource allocation"). An environment with w of W groups gets its n-th group, counted from 0, at one of the
places from floor(n W / w) to ceil((n + 1) W / w) - 1, and of those that may have a place, the one with the earliest end
gets it. Then the first g groups of a run have less than one group more or less of each environment than g w / W, for
each g, and W groups in a row have exactly w.

A fork with other weights goes on with the tasks of each environment where the other run was: checkpoints have the state
of the draw.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.train.checkpoints import Progress
from verl_server.train.mixture import Mixture
from verl_server.train.options import TrainArgs


class Rotation:
    """The order of environments in each period."""

    def __init__(self, shares: Mapping[str, int]) -> None:
        """Take name -> groups of a period."""
        self.period = sum(shares.values())
        self._shares = dict(shares)
        self._order: list[str] = []
        self._places: dict[str, list[int]] = {name: [] for name in shares}
        for place in range(self.period):
            ends = {
                name: -(-(taken + 1) * self.period // share)
                for name, share in shares.items()
                if (taken := len(self._places[name])) * self.period // share <= place
            }
            name = min(ends, key=lambda name: ends[name])  # the first one in the file of several
            self._order.append(name)
            self._places[name].append(place)

    def at(self, place: int) -> tuple[str, int]:
        """Return (environment, number of its groups before) of a place, counted from 0 on."""
        name = self._order[place % self.period]
        return name, self.before(place)[name]

    def before(self, place: int) -> dict[str, int]:
        """Return name -> number of its groups before a place."""
        periods, rest = divmod(place, self.period)
        return {
            name: periods * self._shares[name] + bisect.bisect_left(places, rest)
            for name, places in self._places.items()
        }


class DrawStart(msgspec.Struct, frozen=True, kw_only=True):
    """Where a draw begins. A run begins with the first group and no tasks, a fork where the other run was."""

    group: int = 0
    """Number of the group at the first place of the order."""
    counts: dict[str, int] = {}
    """Environment -> number of its tasks that were given away before. Environments of earlier mixtures stay here."""
    undone: list[tuple[int, str, int]] = []
    """(number, environment, number of its task) of the groups before `group` that are still to be played."""


class DrawState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the draw in a checkpoint. The next start goes on from it, with the same weights or other ones."""

    shares: dict[str, int]
    """Environment -> groups of a period, in the order of the file."""
    groups: int
    """Groups of a step."""
    start: DrawStart


class EnvironmentDraw:
    def __init__(self, mixture: Mixture, groups: int, start: DrawStart | None = None) -> None:
        """Take the environments, and the number of groups of a step on all ranks."""
        self.mixture = mixture
        self._order = _Order(DrawState(shares=mixture.shares, groups=groups, start=start or DrawStart()))

    def of_group(self, number: int) -> tuple[str, int]:
        """Return (name of the environment, number of the task in it) of a group of the run."""
        return self._order.of_group(number)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, in JSON types."""
        state: dict[str, Any] = msgspec.to_builtins(self._order.state)
        return state

    def resume(self, progress: Progress) -> None:
        """Continue from a checkpoint, which may be of a run with another mixture, or with none.

        With the same weights and as many groups a step, the order goes on as it was. Otherwise it begins anew with the
        next group, each environment with its next task. A group that was drawn and not trained keeps its task if the
        environment is still there. Raise BadRequestError if the state of the checkpoint cannot be read.
        """
        before, own = None if progress.draw is None else _Order(_state(progress.draw)), self._order.state
        # Without the number of the next group, it follows from the step.
        goes_on = progress.next_group is not None
        if before is not None and before.has_order_of(own, counts_in_steps=not goes_on):
            self._order = _Order(msgspec.structs.replace(own, start=before.state.start))
            return
        group = progress.next_step * own.groups if progress.next_group is None else progress.next_group
        undone = progress.undone_groups or []
        if before is None:  # the other run had one environment. It may be any of these, so no task of it comes again
            counts, drawn = dict.fromkeys(own.shares, group), [(number, "", number) for number in undone]
        else:
            counts = before.counts_before(group if goes_on else progress.next_step * before.state.groups)
            drawn = [(number, *before.of_group(number)) for number in undone]
        start = DrawStart(group=group, counts=counts, undone=drawn)
        self._order = _Order(msgspec.structs.replace(own, start=start))


class _Order:
    """A rotation from a start on."""

    def __init__(self, state: DrawState) -> None:
        self.state = state
        self._rotation = Rotation(state.shares)
        known = {number: (name, task) for number, name, task in state.start.undone}
        self._undone = {number: drawn for number, drawn in known.items() if drawn[0] in state.shares}
        self._orphans = sorted(known.keys() - self._undone.keys())
        """Undone groups whose environment is gone. They have the first places of the order."""

    def has_order_of(self, state: DrawState, *, counts_in_steps: bool) -> bool:
        """Return True if groups of the same numbers are at the same places.

        `counts_in_steps`: the first number of a step follows from the groups of a step.
        """
        is_alike = list(self.state.shares.items()) == list(state.shares.items())
        return is_alike and (not counts_in_steps or self.state.groups == state.groups)

    def of_group(self, number: int) -> tuple[str, int]:
        if number in self._undone:
            return self._undone[number]
        name, count = self._rotation.at(self._place(number))
        return name, self.state.start.counts.get(name, 0) + count

    def counts_before(self, number: int) -> dict[str, int]:
        """Return environment -> number of its tasks that the groups before a group and earlier runs have."""
        counts = dict(self.state.start.counts)
        for name, count in self._rotation.before(self._place(number)).items():
            counts[name] = counts.get(name, 0) + count
        return counts

    def _place(self, number: int) -> int:
        if number in self._orphans:
            return self._orphans.index(number)
        return len(self._orphans) + number - self.state.start.group


def draw_of(args: TrainArgs) -> EnvironmentDraw | None:
    """Return the draw of a new run with these options, None without a mixture."""
    mixture = args.judged_mixture
    return None if mixture is None else EnvironmentDraw(mixture, args.grpo.groups)


def _state(values: dict[str, Any]) -> DrawState:
    try:
        return msgspec.convert(values, DrawState)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"The draw of environments in the checkpoint cannot be read: {error}.") from None
