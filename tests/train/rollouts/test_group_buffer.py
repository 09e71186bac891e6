"""For random orders of finishing: no group becomes too old, none is lost or used twice, and no step waits forever."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from verl_server.train.journal_records import GroupHead
from verl_server.train.rollouts.group_buffer import Group, GroupBuffer


@dataclass
class Simulation:
    """A run of `steps` steps. Groups finish in a random order, some steps have nothing to train on.

    With `places`, only so many groups play at one time, and the others wait for a place before they begin. `flat` is
    the probability that a group lacks spread.
    """

    buffer: GroupBuffer[str]
    steps: int
    draw: random.Random
    step: int = 0
    places: int = 10**9
    flat: float = 0.0
    version: int = 0
    queued: dict[int, Group[str]] = field(default_factory=dict)
    """Groups that are started and do not play yet."""
    playing: dict[int, Group[str]] = field(default_factory=dict)
    """Groups that play."""
    waiting: dict[int, Group[str]] = field(default_factory=dict)
    """Groups that have finished and are not used."""
    used: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    flat_groups: set[int] = field(default_factory=set)
    """Groups that have finished without spread."""
    replaced: list[int] = field(default_factory=list)
    """Groups without spread that a step did not use, because others were there."""
    ages: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Do what the trainer does whenever it looks: remove groups that no step will use, and start others."""
        for group in self.buffer.take_stale(self.version):
            assert group.start is not None and group.start + self.buffer.max_staleness < self.version
            self.dropped.append(group.number)
            self.playing.pop(group.number, None)
            self.waiting.pop(group.number, None)
        self.buffer.leave_out()
        for group in self.buffer.left_out:
            assert group.lacks_spread
            self.waiting.pop(group.number, None)
        for group in self.buffer.start(self.steps - self.step):
            assert (group.start, group.result) == (None, None)
            self.queued[group.number] = group
        left = min(self.buffer.max_staleness + 1, self.steps - self.step)
        assert len(self.queued) + len(self.playing) + len(self.waiting) <= self.buffer.groups * left
        self.play()

    def play(self) -> None:
        """Do what the rollout process does: begin the groups that came first, with the version that is served."""
        while self.queued and len(self.playing) < self.places:
            group = self.queued.pop(next(iter(self.queued)))
            self.buffer.begin(group.number, self.version, self.step)
            assert (group.start, group.step) == (self.version, self.step)
            self.playing[group.number] = group

    def finish_one(self) -> None:
        # Often the newest group finishes first, which is the hard case.
        number = max(self.playing) if self.draw.random() < 0.5 else self.draw.choice(list(self.playing))
        self.waiting[number] = self.playing.pop(number)
        kind = "flat" if self.flat and self.draw.random() < self.flat else "result"
        self.flat_groups |= {number} if kind == "flat" else set()
        self.buffer.finish(number, f"{kind} {number}")
        self.begin()

    def run_step(self) -> None:
        self.begin()
        while self.draw.random() < 0.6 and self.playing:
            self.finish_one()
        while isinstance(batch := self.buffer.batch(self.version), str):
            assert self.playing, f"all groups have finished, and the step waits for {batch}"
            assert (batch == "episodes") == (len(self.waiting) < self.buffer.groups)
            self.waits.append(batch)
            self.finish_one()
        assert len(batch) == self.buffer.groups
        assert all(group.result in (f"result {group.number}", f"flat {group.number}") for group in batch)
        assert not self.buffer._refills_left or not self.flat_groups & {group.number for group in batch}
        oldest = sorted(self.waiting.values(), key=lambda group: (group.start or 0, group.number))
        assert batch == oldest[: len(batch)]
        self.ages += [self.version - group.start for group in batch if group.start is not None]
        self.replaced += [group.number for group in self.buffer.left_out]
        self.buffer.use(batch, self.step)
        self.step += 1
        self.version += self.draw.random() < 0.8
        self.buffer.done(batch)
        for group in batch:
            self.used.append(group.number)
            del self.waiting[group.number]
        self.begin()


def started(buffer: GroupBuffer[str], version: int, steps_left: int) -> list[Group[str]]:
    """Start groups that begin to play at once."""
    groups = buffer.start(steps_left)
    for group in groups:
        buffer.begin(group.number, version, 0)
    return groups


CASES = [(groups, staleness) for groups in range(1, 6) for staleness in range(5)]


@pytest.mark.parametrize(("groups", "staleness"), CASES)
def test_no_group_is_lost_or_too_old(groups: int, staleness: int) -> None:
    waits, ages = set[str](), set[int]()
    for seed in range(12):
        run = Simulation(GroupBuffer(groups, staleness), 12, random.Random(seed))
        for _ in range(run.steps):
            run.run_step()
        assert sorted(run.used) == list(range(groups * run.steps))  # each once, and none that no step uses
        assert not run.buffer.undone and run.buffer.next_group == groups * run.steps
        waits.update(run.waits)
        ages.update(run.ages)
    assert ages == set(range(staleness + 1))
    assert "episodes" in waits and ("deadline" in waits) == (staleness > 0)


@pytest.mark.parametrize(("groups", "staleness"), CASES)
def test_groups_that_wait_for_a_place_do_not_grow_old(groups: int, staleness: int) -> None:
    for seed in range(12):
        run = Simulation(GroupBuffer(groups, staleness), 12, random.Random(seed), places=1)
        for _ in range(run.steps):
            run.run_step()
        assert sorted(run.used) == list(range(groups * run.steps))
        assert max(run.ages) <= staleness


@pytest.mark.parametrize(("groups", "staleness"), CASES)
def test_dropping_waits_for_no_deadline_and_uses_nothing_too_old(groups: int, staleness: int) -> None:
    dropped = 0
    for seed in range(12):
        run = Simulation(GroupBuffer(groups, staleness, drops=True), 12, random.Random(seed))
        for _ in range(run.steps):
            run.run_step()
        assert "deadline" not in run.waits and max(run.ages) <= staleness
        fates = [*run.used, *run.dropped]
        assert sorted(fates) == list(range(run.buffer.next_group)) and not run.buffer.undone
        dropped += len(run.dropped)
    assert (dropped > 0) == (staleness > 0)


def lacks_spread(result: str) -> bool:
    return result.startswith("flat")


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("groups", "staleness"), CASES)
def test_groups_without_spread_are_replaced_up_to_the_bound(groups: int, staleness: int, drops: bool) -> None:
    """Each group has one fate, none is too old, and no step waits forever, also if no group has spread."""
    for seed, flat in itertools.product(range(4), (0.3, 0.6, 1.0)):
        refill = groups * (seed % 2 + 1)
        buffer = GroupBuffer[str](groups, staleness, drops=drops, refill=refill, lacks_spread=lacks_spread)
        run = Simulation(buffer, 12, random.Random(seed), places=1 if seed == 3 else 10**9, flat=flat)
        for step in range(run.steps):
            run.run_step()
            most = refill * (staleness + 1 + step)
            assert len(run.replaced) == most if flat == 1.0 else len(run.replaced) <= most
        assert max(run.ages) <= staleness and (drops or not run.dropped)
        assert sorted([*run.used, *run.replaced, *run.dropped]) == list(range(buffer.next_group)) and not buffer.undone


def test_a_group_that_a_step_uses_is_not_left_out() -> None:
    """The bound was reached, so a step uses a group without spread. The bound of the next step is not for it."""
    buffer = GroupBuffer[str](1, 0, refill=1, lacks_spread=lacks_spread)
    (first,) = started(buffer, 0, 9)
    buffer.finish(first.number, "flat")
    buffer.leave_out()
    (second,) = started(buffer, 0, 9)
    buffer.finish(second.number, "flat")
    buffer.leave_out()
    assert buffer.left_out == [first] and buffer.undone == [0, 1] and buffer.undone_at(3) == [0, 1]
    assert buffer.batch(0) == [second]
    buffer.use([second], 3)
    buffer.leave_out()
    assert buffer.left_out == [] and buffer.undone_at(3) == [0, 1] and buffer.undone_at(4) == []
    buffer.done([second])
    assert buffer.undone == []


def test_a_group_without_spread_of_an_earlier_start_is_left_out_too() -> None:
    buffer = GroupBuffer[str](1, 1, refill=2, lacks_spread=lacks_spread)
    buffer.resume(2, [0, 1], version=5)
    first, second = buffer.start(9)
    assert buffer.keep(first, 5, "flat", 5, 7) and buffer.keep(second, 5, "result", 5, 7)
    buffer.leave_out()
    assert buffer.left_out == [first] and [group.number for group in buffer.start(9)] == [2]
    assert buffer.undone == [0, 1, 2] and buffer.batch(5) == [second]


@pytest.mark.parametrize(("groups", "staleness"), CASES)
def test_a_resumed_run_starts_the_undone_groups_first(groups: int, staleness: int) -> None:
    """The run is killed several times, and goes on with the numbers of a checkpoint and with version 0 again."""
    for seed in range(10):
        draw = random.Random(seed)
        run = Simulation(GroupBuffer(groups, staleness), 12, draw)
        used = []
        while run.step < run.steps:
            run.run_step()
            if draw.random() < 0.4:
                used += run.used
                undone, next_group = run.buffer.undone, run.buffer.next_group
                assert undone == sorted([*run.queued, *run.playing, *run.waiting])
                run = Simulation(GroupBuffer(groups, staleness), run.steps, draw, run.step)
                run.buffer.resume(next_group, reversed(undone))
                assert (run.buffer.undone, run.buffer.next_group) == (undone, next_group)
                run.begin()
                assert list(run.playing) == undone[: len(run.playing)]
        assert sorted(used + run.used) == list(range(groups * run.steps))


def test_a_resumed_run_with_fewer_permits_starts_the_others_later() -> None:
    buffer: GroupBuffer[str] = GroupBuffer(2, 0)
    buffer.resume(9, [3, 5, 6, 8])
    assert [group.number for group in started(buffer, 4, 10)] == [3, 5]
    assert buffer.undone == [3, 5, 6, 8]
    buffer.finish(5, "b")
    assert buffer.batch(4) == "episodes"
    buffer.finish(3, "a")
    batch = buffer.batch(4)
    assert not isinstance(batch, str) and [group.result for group in batch] == ["a", "b"]
    buffer.done(batch)
    assert [group.number for group in itertools.chain(started(buffer, 5, 9))] == [6, 8]


def test_a_step_waits_for_the_group_that_only_it_can_use() -> None:
    """With one group a step and an age of 1 at most, group 0 must be used before version 2."""
    buffer: GroupBuffer[str] = GroupBuffer(1, 1)
    assert [group.number for group in started(buffer, 0, 9)] == [0, 1]
    buffer.finish(1, "quick")
    batch = buffer.batch(0)
    assert not isinstance(batch, str) and batch[0].number == 1
    buffer.done(batch)
    assert [group.number for group in started(buffer, 1, 8)] == [2]
    buffer.finish(2, "quick, too")
    assert buffer.batch(1) == "deadline"
    buffer.finish(0, "slow")
    batch = buffer.batch(1)
    assert not isinstance(batch, str) and batch[0].number == 0


def test_what_a_dropped_group_brings_is_ignored() -> None:
    buffer: GroupBuffer[str] = GroupBuffer(1, 0, drops=True)
    started(buffer, 0, 9)
    assert [group.number for group in buffer.take_stale(1)] == [0]
    buffer.finish(0, "too late")
    assert buffer.undone == [] and buffer.batch(1) == "episodes"
    (group,) = started(buffer, 1, 8)
    buffer.finish(group.number, "first")
    buffer.finish(group.number, "again")
    assert group.number == 1 and group.result == "first"


@pytest.mark.parametrize("drops", [False, True])
def test_old_groups_are_kept_only_as_far_as_the_steps_can_use_them(drops: bool) -> None:
    buffer: GroupBuffer[str] = GroupBuffer(2, 1, drops=drops)
    buffer.resume(4, [0, 1, 2, 3], version=5)
    first, second, third, fourth = buffer.start(9)
    assert not buffer.keep(first, 3, "too old", 5, 7)
    assert buffer.keep(first, 4, "due now", 5, 7) and buffer.keep(second, 4, "due now", 5, 7)
    # The step at 5 uses two groups. Without dropping, a third one that is due has no step.
    assert buffer.keep(third, 4, "due now", 5, 7) == drops
    assert buffer.keep(fourth, 5, "due later", 5, 7)
    assert (third.is_kept, third.start, third.result) == ((True, 4, "due now") if drops else (False, None, None))
    assert (fourth.is_kept, fourth.step, fourth.start) == (True, 7, 5)
    assert buffer.batch(5) == [first, second]


def test_a_group_that_was_dropped_in_a_step_that_is_lost_is_undone() -> None:
    buffer: GroupBuffer[str] = GroupBuffer(1, 0, drops=True)
    (group,) = started(buffer, 0, 9)
    assert buffer.take_stale(1, step=3) == [group] and buffer.undone == []
    assert buffer.undone_at(3) == [0] and buffer.undone_at(4) == []
    (other,) = started(buffer, 1, 9)
    buffer.finish(other.number, "result")
    buffer.use([other], 3)
    assert buffer.undone_at(3) == [0, 1] and buffer.undone_at(4) == []
    buffer.done([other])
    assert buffer.undone_at(4) == []


def test_the_journal_needs_what_is_undone_now_or_in_the_checkpoint() -> None:
    buffer: GroupBuffer[str] = GroupBuffer(1, 1)
    buffer.resume(3, [1], version=4)
    (first, second) = started(buffer, 4, 9)
    buffer.finish(first.number, "result")
    buffer.use([first], 6)
    buffer.done([first])
    is_needed = buffer.needed(7, "aaaaaaaa")

    def needed(number: int, version: str) -> bool:
        return is_needed(GroupHead(number=number, version=version, step=0))

    assert second.number == 3
    assert not needed(0, "3@aaaaaaaa") and not needed(2, "3@aaaaaaaa")  # done in the checkpoint
    assert needed(1, "5@aaaaaaaa") and needed(1, "9@bbbbbbbb")  # undone in it
    assert not needed(1, "6@aaaaaaaa")  # too far from it
    assert needed(3, "9@aaaaaaaa") and needed(4, "9@aaaaaaaa")


def test_the_journal_needs_what_a_checkpoint_needs_that_is_being_written() -> None:
    """So it does until that one is on the disk, and what the last one needs as long."""
    buffer: GroupBuffer[str] = GroupBuffer(1, 1)
    buffer.resume(3, [1], version=4)
    buffer.note_saving(9, 8, [6])
    started(buffer, 9, 99)
    buffer.next_group = 20

    def needed(number: int, version: str) -> bool:
        return buffer.needed(30, "aaaaaaaa")(GroupHead(number=number, version=version, step=0))

    assert needed(6, "10@aaaaaaaa") and needed(8, "10@aaaaaaaa")  # undone in the new one
    assert not needed(6, "11@aaaaaaaa") and not needed(2, "3@aaaaaaaa")
    assert needed(4, "5@aaaaaaaa")  # undone in the last one
    buffer.note_saved()
    assert needed(6, "10@aaaaaaaa") and not needed(4, "5@aaaaaaaa")


def test_a_group_that_goes_on_is_as_old_as_its_oldest_episode() -> None:
    buffer: GroupBuffer[str] = GroupBuffer(1, 1)
    buffer.resume(0, [], version=4)
    first, second = buffer.start(9)
    assert not buffer.go_on(first, 2, 4) and first.oldest is None and first.start is None  # too old
    assert buffer.go_on(first, 3, 4)
    assert not buffer.go_on(second, 3, 4) and second.oldest is None  # one step cannot use both
    for group in (first, second):
        buffer.begin(group.number, 4, 7)
    assert (first.start, first.step, first.is_kept) == (3, 7, False) and second.start == 4
    buffer.finish(second.number, "result")
    assert buffer.batch(4) == "deadline"  # the step waits for the older one
    buffer.finish(first.number, "result")
    assert buffer.batch(4) == [first]
