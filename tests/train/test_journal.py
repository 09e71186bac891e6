"""Finished groups are on the disk as they finish, are removed when a checkpoint has them, and never end a run."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import make_trajectory, save_at_once
from tests.train.test_async_grpo import facts, playing, same, trainer_of, weights
from verl_server.errors import BadRequestError
from verl_server.files.record_file import RecordFile
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.ancestors import Ancestors
from verl_server.train.checkpoints import Progress
from verl_server.train.grpo import GRPO
from verl_server.train.journal import FinishedGroup, GroupJournal, check_journals, read_groups
from verl_server.train.kept_groups import KeptGroups, relabel
from verl_server.train.ranks import all_ranks
from verl_server.train.run_folder import RunFolder
from verl_server.train.run_tasks import make_tasks
from verl_server.train.step_journal import StepJournal, joined
from verl_server.train.task_order import TaskOrder
from verl_server.watch.run_records import JournalFailed
from verl_server.weight_version import WeightVersion

A, B, C, X = "aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd"


def rollout(*labels: str, group: int = 0, reward: float | None = 1.0) -> Rollout:
    trajectory = make_trajectory(group, reward, length=len(labels))
    trajectory.weight_versions = ["", "", *labels]
    return Rollout(trajectories=[trajectory], replaced=[make_trajectory(group, None)], seconds=0.1)


def found(folder: Path) -> list[FinishedGroup]:
    return list(read_groups(folder, lambda head: True))


def test_groups_are_read_as_they_were(tmp_path: Path) -> None:
    first, second = rollout(f"0@{A}"), rollout(f"3@{A}", f"4@{A}", group=7)
    first.trajectories[0].logprobs[2] = -0.1 - 1e-16
    first.trajectories[0].turns[0].observation = {"text": "\ud7ff", "n": [1, 2.5, None, {"a": b"bytes"}]}
    journal = GroupJournal(tmp_path)
    journal.put(3, f"0@{A}", 0, first)
    journal.base = f"3@{B}"
    journal.put(7, f"3@{A}", 2, second)
    second.trajectories[0].reward = None  # the trainer leaves the episode out
    journal.close()
    one, two = found(tmp_path)
    assert (one.number, one.version, one.base, one.step) == (3, f"0@{A}", "", 0)
    assert one.rollout.trajectories[0].logprobs == first.trajectories[0].logprobs
    assert one.rollout.trajectories[0].turns[0].observation == first.trajectories[0].turns[0].observation
    assert one.rollout.replaced == first.replaced
    assert (two.number, two.base, two.rollout.trajectories[0].reward) == (7, f"3@{B}", 1.0)
    assert [group.number for group in read_groups(tmp_path, lambda head: head.number == 7)] == [7]


def test_a_group_whose_episodes_all_failed_is_played_again(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path)
    journal.put(3, f"0@{A}", 0, rollout(f"0@{A}", reward=None))
    journal.close()
    assert found(tmp_path) == [] and not list(tmp_path.iterdir())


def test_what_nobody_needs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = GroupJournal(tmp_path)
    for number in range(6):
        journal.put(number, f"0@{A}", 0, rollout(f"0@{A}"))
    journal.keep(lambda head: head.number >= 4)  # too little for a file to be written anew
    journal.close()
    assert [group.number for group in found(tmp_path)] == list(range(6))
    later = GroupJournal(tmp_path)
    later.keep(lambda head: head.number != 4, at_once=True)
    later.put(6, f"0@{A}", 0, rollout(f"0@{A}"))
    later.close()
    assert [group.number for group in found(tmp_path)] == [0, 1, 2, 3, 5, 6]
    monkeypatch.setattr("verl_server.train.journal._COMPACT_BYTES", 1)
    last = GroupJournal(tmp_path)
    last.keep(lambda head: head.number > 1)  # less is dead than is needed
    last.keep(lambda head: head.number > 3)
    last.close()
    assert [group.number for group in found(tmp_path)] == [5, 6]


def test_journals_of_ranks_that_are_gone_are_read_and_removed(tmp_path: Path) -> None:
    for rank in range(4):
        journal = GroupJournal(tmp_path, rank, 4)
        journal.put(rank, f"0@{A}", 0, rollout(f"0@{A}"))
        journal.close()
    journals = [GroupJournal(tmp_path, rank, 2) for rank in range(2)]
    assert [group.number for group in found(tmp_path)] == [0, 1, 2, 3]
    for journal in journals:
        journal.keep(lambda head: head.number >= 3, at_once=True)
        journal.close()
    assert [group.number for group in found(tmp_path)] == [3]
    assert not (tmp_path / "journal-rank2.msgpack").exists() and (tmp_path / "journal-rank3.msgpack").exists()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_journal_that_cannot_be_written_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    events: list[Any] = []
    journal = GroupJournal(tmp_path, 1, 2, events.append)
    journal.put(0, f"0@{A}", 0, rollout(f"0@{A}"))
    journal.close()
    journal = GroupJournal(tmp_path, 1, 2, events.append)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, full)
        for number in (1, 2):
            journal.put(number, f"0@{A}", 0, rollout(f"0@{A}"))
        journal.close()
        assert [(event.rank, event.file) for event in events] == [(1, "journal-rank1.msgpack")]
        assert isinstance(events[0], JournalFailed) and "No space" in events[0].error
        assert caplog.text.count("The run goes on") == 1
    # The thread has ended, so its successor tries again.
    journal = GroupJournal(tmp_path, 1, 2, events.append)
    journal.put(3, f"0@{A}", 0, rollout(f"0@{A}"))
    journal.close()
    assert [group.number for group in found(tmp_path)] == [0, 3] and len(events) == 1


def test_values_that_cannot_be_encoded_do_not_end_the_run(tmp_path: Path) -> None:
    events: list[Any] = []
    journal = GroupJournal(tmp_path, note=events.append)
    odd = rollout(f"0@{A}")
    odd.trajectories[0].turns[0].observation = {"x": 2**70}
    journal.put(0, f"0@{A}", 0, odd)
    journal.put(1, f"0@{A}", 0, rollout(f"0@{A}"))
    journal.close()
    assert [group.number for group in found(tmp_path)] == [1] and len(events) == 1


def test_a_damaged_journal_is_refused_with_its_remedy(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path)
    for number in range(3):
        journal.put(number, f"0@{A}", 0, rollout(f"0@{A}"))
    journal.close()
    path = tmp_path / "journal-rank0.msgpack"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRequestError, match=r"journal-rank0\.msgpack is damaged at byte 0.* or remove it"):
        check_journals(tmp_path)
    path.unlink()
    RecordFile(path).append(b"\x01")
    with pytest.raises(BadRequestError, match=r"cannot read: .*Remove the file to continue"):
        check_journals(tmp_path)
    with pytest.raises(BadRequestError, match=r"already holds a run \(journal-rank0"):
        RunFolder(tmp_path).start()


# -- versions of earlier starts ----------------------------------------------------------------------------------------


def test_the_age_of_a_lost_version_is_the_way_through_the_common_ancestor() -> None:
    ancestors = Ancestors.of(Progress(6, 6, incarnation=B, ancestors={A: 5}))
    assert [ancestors.number_of(f"{n}@{A}", C) for n in (3, 5, 6, 7)] == [3, 5, 4, 3]
    assert [ancestors.number_of(f"{n}@{B}", C) for n in (5, 6, 8)] == [5, 6, 4]
    assert [ancestors.number_of(label, C) for label in (f"9@{C}", f"9@{X}", "free", "")] == [9, None, None, None]
    # A start that continued from 7@A, and one from 5@B; nobody continued them.
    lost = ancestors.with_branch(X, WeightVersion(7, A))
    assert [lost.number_of(f"{n}@{X}", C) for n in (7, 8)] == [3, 2]
    assert ancestors.with_branch(X, WeightVersion(5, B)).number_of(f"6@{X}", C) == 4
    assert ancestors.with_branch(X, None) == ancestors.with_branch(X, WeightVersion(5, "eeeeeeee")) == ancestors
    # The user went back to a checkpoint before that of B.
    older = Ancestors.of(Progress(4, 4, incarnation=A)).with_branch(B, WeightVersion(5, A))
    assert [older.number_of(f"{n}@{B}", C) for n in (5, 6)] == [3, 2]
    assert Ancestors.of(Progress(4, 4)) == Ancestors()


def test_the_oldest_token_decides_and_the_youngest_play_of_a_group_is_kept(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path)
    journal.put(1, f"4@{A}", 4, rollout(f"4@{A}", f"5@{A}", f"7@{A}"))
    journal.put(2, f"6@{A}", 6, rollout(f"6@{A}"))
    journal.put(4, f"6@{X}", 6, rollout(f"6@{X}"))
    journal.base = f"5@{A}"
    journal.put(2, f"5@{B}", 5, rollout(f"5@{B}"))
    journal.put(3, f"6@{B}", 5, rollout(f"6@{B}", "free"))
    journal.close()
    kept = KeptGroups.read(tmp_path, Ancestors.of(Progress(5, 5, incarnation=A)), lambda head: head.number < 9)
    assert {number: group.start for number, group in kept.groups.items()} == {1: 3, 2: 5, 3: 4}
    assert kept.ancestors.forks == {A: 5, B: 5}
    assert kept.take(2) is not None and kept.take(2) is None


# -- the synchronous run -----------------------------------------------------------------------------------------------


def names(trajectories: list[Trajectory]) -> list[int]:
    return [trajectory.task.group for trajectory in trajectories]


def test_a_step_keeps_the_groups_of_exactly_its_weights(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path)
    for number, label in [(7, f"2@{A}"), (8, f"2@{A}"), (9, f"2@{B}"), (10, f"1@{A}"), (11, f"3@{A}"), (12, f"2@{A}")]:
        journal.base = f"2@{A}" if label.endswith(B) else ""
        journal.put(number, label, 2, rollout(label, group=number % 4))
    journal.close()
    order, progress = TaskOrder(4), Progress(2, 2, incarnation=A)
    order.resume(progress)
    step = StepJournal(order)
    step.resume(tmp_path, progress)
    tasks = [make_trajectory(group, 1.0).task for group in (0, 0, 1, 1, 2, 2, 3, 3)]
    ended: list[Trajectory] = []
    version = WeightVersion(2, C)
    kept = step.take(tasks, 2, version, ended.append)
    assert list(kept) == [0, 1] and len(ended) == 4
    assert {v for t in ended for v in t.weight_versions if v and t.reward} == {str(version)}
    assert step.take(tasks, 2, version) == {}
    played = Rollout(trajectories=[make_trajectory(group, 1.0) for group in (2, 2, 3)], seconds=2.0)
    assert names(joined(played, kept).trajectories) == [0, 1, 2, 2, 3] and joined(played, kept).seconds == 2.0
    assert names(joined(None, kept).trajectories) == [0, 1]


@pytest.mark.parametrize(("is_saved", "stay"), [(False, [1, 2, 4]), (True, [2, 4])])
def test_groups_stay_that_the_last_checkpoint_needs_or_the_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool, stay: list[int]
) -> None:
    monkeypatch.setattr("verl_server.train.journal._COMPACT_BYTES", 1)
    journal = GroupJournal(tmp_path)
    step = StepJournal(1, journal)
    step.resume(tmp_path, Progress(1, 1, incarnation=A))
    for number in (1, 2, 3, 4):
        if number == 2:
            step.saving(2)
        for _ in range(9 if number == 3 else 1):  # of step 3 is more than of the others: it is removed
            journal.put(number, f"{number}@{A}", number, rollout(f"{number}@{A}"))
        step.step_ended(number + 1)
    if is_saved:
        step.saved(2)
    journal.close()
    assert [group.number for group in found(tmp_path)] == stay


def test_tokens_of_other_weights_keep_their_labels() -> None:
    mixed = rollout(f"2@{A}", f"2@{X}", "free")
    relabel([mixed], Ancestors({A: 2}), WeightVersion(2, C))
    assert mixed.trajectories[0].weight_versions == ["", "", f"2@{C}", f"2@{X}", "free"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_run_that_was_killed_in_a_rollout_continues_bit_for_bit(
    policy_folder: Path, tmp_path: Path, steps_before: int
) -> None:
    """It dies when two of three groups of a step have finished. The resumed run plays the third one only."""
    with playing(policy_folder) as (servers, loop):
        straight = GRPO(trainer_of(policy_folder, 4), servers, loop, all_ranks())  # type: ignore[arg-type]
        straight.push()
        expected = [straight.step() for _ in range(4)]
    with playing(policy_folder) as (servers, loop):
        journal = GroupJournal(tmp_path)
        run = GRPO(trainer_of(policy_folder, 4), servers, loop, all_ranks(), journal=journal)  # type: ignore[arg-type]
        run.push()
        for _ in range(steps_before):
            run.step()
        save_at_once(run, tmp_path)
        tasks = make_tasks(steps_before, run.trainer.config, 0, 2)
        write = run._journal.writer(steps_before, run.weight_version)
        loop.run_async(loop.arun(tasks, version=str(run.weight_version), on_group=write))
        journal.close()
    assert [g.number for g in found(tmp_path)] == [steps_before * 3, steps_before * 3 + 1]
    with playing(policy_folder) as (servers, loop):
        journal = GroupJournal(tmp_path)
        again = GRPO(trainer_of(policy_folder, 4), servers, loop, all_ranks(), journal=journal)  # type: ignore[arg-type]
        again.load(tmp_path / f"checkpoint-{steps_before}")
        again.push()
        started: list[int] = []
        start = loop.start

        def noted(tasks: Any, *arguments: Any, **settings: Any) -> Any:
            started.append(len(tasks))
            return start(tasks, *arguments, **settings)

        loop.start = noted  # type: ignore[method-assign]
        finished: list[Trajectory] = []
        steps = [again.step(finished.append) for _ in range(4 - steps_before)]
        save_at_once(again, tmp_path)
        journal.close()
    assert started == [4, *[12] * (3 - steps_before)] and len(finished) == 12 * (4 - steps_before)
    assert [step.metrics.kept_groups for step in steps] == [2, *[0] * (3 - steps_before)]
    for step, other in zip(expected[steps_before:], steps, strict=True):
        assert [facts(t) for t in step.rollout.trajectories] == [facts(t) for t in other.rollout.trajectories]
        assert other.metrics.losses == step.metrics.losses and other.metrics.logprob_gap == step.metrics.logprob_gap
    assert same(weights(straight.trainer), weights(again.trainer))
    assert found(tmp_path) == []


@pytest.mark.usefixtures("one_rank")
def test_a_step_all_of_whose_groups_had_finished_plays_none(policy_folder: Path, tmp_path: Path) -> None:
    with playing(policy_folder) as (servers, loop):
        journal = GroupJournal(tmp_path)
        run = GRPO(trainer_of(policy_folder, 4), servers, loop, all_ranks(), journal=journal)  # type: ignore[arg-type]
        run.push()
        save_at_once(run, tmp_path)
        run.step()
        journal.close()  # the run is killed before a checkpoint has the step
    expected = weights(run.trainer)
    with playing(policy_folder) as (servers, loop):
        again = GRPO(trainer_of(policy_folder, 4), servers, loop, all_ranks())  # type: ignore[arg-type]
        again.load(tmp_path / "checkpoint-0")
        again.push()
        loop.start = None  # type: ignore[assignment, method-assign]
        step = again.step()
    assert step.metrics.kept_groups == 3 and same(expected, weights(again.trainer))
