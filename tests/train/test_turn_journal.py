"""Turns are on the disk as they end, are removed with their group, and never end a run."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import make_trajectory
from tests.train.test_journal import rollout
from verl_server.errors import BadRequestError
from verl_server.rollout.recorded_turns import EpisodeProgress, RecordedTurn
from verl_server.rollout.trajectory import Turn
from verl_server.train import turn_journal
from verl_server.train.ancestors import Ancestors
from verl_server.train.checkpoints import Progress
from verl_server.train.episode_counts import EpisodeCounts
from verl_server.train.journal import GroupJournal, check_journals, read_groups
from verl_server.train.kept_groups import KeptGroups
from verl_server.train.run_folder import RunFolder
from verl_server.train.turn_journal import TurnJournal, TurnRecord, read_turns

A, B, X = "aaaaaaaa", "bbbbbbbb", "dddddddd"
NAME = "turns-rank0.msgpack"


def turn(number: int, *labels: str, member: int = 0, attempt: int = 0, **observation: Any) -> EpisodeProgress:
    record = RecordedTurn(
        number=number,
        turn=Turn(observation=observation, observation_span=(0, 1), action_span=(1, 1 + len(labels))),
        observation_tokens=[1],
        action_tokens=[2] * len(labels),
        logprobs=[-1.0] * len(labels),
        weight_versions=list(labels),
        answer={"text": "higher"},
    )
    return EpisodeProgress(member=member, attempt=attempt, turn=record)


def ended(*labels: str, member: int = 0) -> EpisodeProgress:
    return EpisodeProgress(member=member, ended=rollout(*labels).trajectories[0])


def found(folder: Path) -> list[TurnRecord]:
    return list(read_turns(folder, lambda head: True))


def numbers(folder: Path) -> list[int]:
    return [record.number for record in found(folder)]


class Writing:
    """A journal that writes when it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
        monkeypatch.setattr(turn_journal, "_FLUSH_SECONDS", 3600.0)
        self.journal = TurnJournal(folder, *arguments)

    def put(self, *groups: int, version: str = f"0@{A}") -> None:
        for number in groups:
            self.journal.put(number, version, "", 0, turn(0, version))
        self.journal._flush()


def test_turns_are_read_as_they_were(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path, records_turns=True)
    journal.base = f"3@{B}"
    first, second = turn(0, f"3@{A}", n=[1, 2.5, None, b"bytes"]), turn(1, f"4@{A}")
    for progress in (first, second, turn(0, f"3@{A}", member=1), ended(f"3@{A}", member=1)):
        journal.progress(7, f"3@{A}", 2, progress)
    second.turn.weight_versions.clear()  # type: ignore[union-attr]
    journal.close()
    one, two, _, last = found(tmp_path)
    assert (one.number, one.version, one.base, one.step) == (7, f"3@{A}", f"3@{B}", 2)
    assert one.progress.turn is not None and two.progress.turn is not None
    assert one.progress.turn.turn.observation == {"n": [1, 2.5, None, b"bytes"]}
    assert two.progress.turn.weight_versions == [f"4@{A}"]
    assert one.play == two.play and last.progress.ended is not None
    assert list(read_turns(tmp_path, lambda head: head.number == 3)) == [] == list(read_groups(tmp_path, bool))


def test_turns_of_some_time_are_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[int] = []
    fsync = os.fsync
    writing = Writing(tmp_path, monkeypatch)
    writing.put(1)
    monkeypatch.setattr(os, "fsync", lambda fd: flushes.append(fd) or fsync(fd))  # type: ignore[func-returns-value]
    writing.put(2, 3, 4)
    assert len(flushes) == 1 and numbers(tmp_path) == [1, 2, 3, 4]
    writing.journal.close()


def test_turns_leave_with_their_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(tmp_path, monkeypatch)
    writing.put(1, 2)
    writing.put(3)
    writing.journal.close_group(2)
    writing.put(2, 4)  # its last turn waited
    writing.journal.keep(lambda head: head.number != 3)
    writing.journal._flush()
    assert numbers(tmp_path) == [1, 2, 3, 4]  # too little for a file to be written anew
    writing.journal.keep(lambda head: head.number != 3, at_once=True)
    writing.put(5)
    assert numbers(tmp_path) == [1, 4, 5]
    monkeypatch.setattr(turn_journal, "_COMPACT_BYTES", 1)
    writing.journal.close_group(1)
    writing.put(6)
    assert numbers(tmp_path) == [1, 4, 5, 6]  # more is needed than is not
    writing.journal.close_group(4)
    writing.journal.close_group(5)
    writing.put(7)
    assert numbers(tmp_path) == [6, 7]
    writing.journal.close()
    later = Writing(tmp_path, monkeypatch)  # a start that goes on
    later.journal.keep(lambda head: head.number == 7, at_once=True)
    later.put(8)
    assert numbers(tmp_path) == [7]  # 8 is not needed either
    later.journal.close()


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_group_that_has_finished_has_no_turns(tmp_path: Path, succeeds: bool) -> None:
    journal = GroupJournal(tmp_path, records_turns=True)
    journal.progress(3, f"0@{A}", 0, turn(0, f"0@{A}"))
    journal.progress(4, f"0@{A}", 0, turn(0, f"0@{A}"))
    journal.put(3, f"0@{A}", 0, rollout(f"0@{A}", reward=1.0 if succeeds else None))
    journal.keep(lambda head: True, at_once=True)
    journal.close()
    assert numbers(tmp_path) == [4] and len(list(read_groups(tmp_path, lambda head: True))) == succeeds


def test_turns_are_not_recorded_unless_asked_for(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path)
    journal.progress(3, f"0@{A}", 0, turn(0, f"0@{A}"))
    journal.close()
    assert not journal.records_turns and not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_told_once_and_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    events: list[Any] = []
    writing = Writing(tmp_path, monkeypatch, 0, 1, events.append)
    journal = writing.journal

    def put(number: int) -> None:
        journal.put(3, f"0@{A}", "", 0, turn(number, f"0@{A}"))
        journal._flush()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    put(0)
    put(1)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, full)
        put(2)
        put(3)
    put(4)
    journal.close()
    assert [(event.file, "No space" in event.error) for event in events] == [(NAME, True)]
    assert caplog.text.count("The run goes on") == 1 and "It lacks turns" in caplog.text
    group = KeptGroups.read(tmp_path, Ancestors({A: 0}), lambda head: True, replays=True).open.take(3, 0)
    assert group is not None and [t.number for t in group.episodes[0].turns] == [0, 1]


def test_values_that_cannot_be_encoded_do_not_end_the_run(tmp_path: Path) -> None:
    events: list[Any] = []
    journal = TurnJournal(tmp_path, note=events.append)
    journal.put(3, f"0@{A}", "", 0, turn(0, f"0@{A}", n=2**70))
    journal.put(4, f"0@{A}", "", 0, turn(0, f"0@{A}"))
    journal.close()
    assert numbers(tmp_path) == [4] and len(events) == 1


def test_a_damaged_journal_is_refused_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(tmp_path, monkeypatch)
    writing.put(1)
    writing.put(2)
    writing.journal.close()
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRequestError, match=r"turns-rank0\.msgpack is damaged at byte 0.* or remove it"):
        check_journals(tmp_path)
    with pytest.raises(BadRequestError, match=r"already holds a run \(turns-rank0"):
        RunFolder(tmp_path).start()


def test_journals_of_ranks_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        writing = Writing(tmp_path, monkeypatch, rank, 4)
        writing.put(rank)
        writing.journal.close()
    for rank in range(2):
        writing = Writing(tmp_path, monkeypatch, rank, 2)
        writing.journal.keep(lambda head: head.number >= 3, at_once=True)
        writing.journal.close()
    assert numbers(tmp_path) == [3]


# -- what a resumed run makes of them ----------------------------------------------------------------------------------


def opened(folder: Path, **forks: int) -> KeptGroups:
    progress = Progress(5, 5, incarnation=A, ancestors=forks)
    return KeptGroups.read(folder, Ancestors.of(progress), lambda head: head.number < 9, replays=True)


def test_the_latest_play_of_an_episode_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began again in the second start, went on in the third, and another rank has the third's turns."""
    clock = iter(range(100))
    monkeypatch.setattr(turn_journal.time, "time", lambda: float(next(clock)))
    label = f"5@{A}"
    first = TurnJournal(tmp_path, 1, 2)
    for number in range(4):
        first.put(3, label, "", 5, turn(number, label, member=1))
    first.close()
    second = TurnJournal(tmp_path, 1, 2)
    second.go_on(opened(tmp_path).open.plays)
    for number in range(2):
        second.put(3, label, label, 5, turn(number, label, member=1, text=f"again {number}"))
    second.close()
    third = TurnJournal(tmp_path, 0, 1)
    third.go_on(opened(tmp_path).open.plays)
    third.put(3, label, label, 5, turn(2, label, member=1, text="third"))
    third.close()
    group = opened(tmp_path).open.take(3, 5)
    assert group is not None and group.start == 5
    (episode,) = group.episodes
    assert (episode.member, [t.number for t in episode.turns]) == (1, [0, 1, 2])
    assert [t.turn.observation["text"] for t in episode.turns] == ["again 0", "again 1", "third"]


def test_the_oldest_token_of_an_episode_decides(tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path)
    journal.put(1, f"4@{A}", "", 4, turn(0, f"4@{A}", f"5@{A}"))
    journal.put(1, f"4@{A}", "", 4, turn(1, f"7@{A}"))  # two versions beyond the checkpoint, so it is at 3
    journal.put(1, f"4@{A}", "", 4, turn(0, f"4@{A}", member=1))
    journal.put(1, f"4@{A}", "", 4, ended(f"5@{A}", f"6@{A}", member=2))
    journal.put(1, f"4@{A}", "", 4, turn(0, f"5@{X}", member=3))  # of no known start
    journal.put(2, f"5@{B}", f"5@{A}", 5, turn(0, f"5@{B}"))
    journal.close()
    found = [opened(tmp_path).open.take(1, oldest) for oldest in (3, 4, 5)]
    assert [group and (group.start, [e.member for e in group.episodes]) for group in found] == [
        (3, [0, 1, 2]),
        (4, [1, 2]),
        None,
    ]
    kept = opened(tmp_path)
    assert kept.open.take(2, 5) is not None and kept.open.take(2, 5) is None and kept.ancestors.forks == {A: 5, B: 5}


def test_a_group_that_has_finished_is_not_open(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path)
    journal.put(3, f"5@{A}", 5, rollout(f"5@{A}"))
    journal.close()
    turns = TurnJournal(tmp_path)
    turns.put(3, f"5@{A}", "", 5, turn(0, f"5@{A}"))
    turns.close()
    kept = opened(tmp_path)
    assert 3 in kept.groups and kept.open.take(3, 0) is None
    assert not KeptGroups.read(tmp_path, Ancestors({A: 5}), lambda head: True).open.episodes


def test_counts_of_trajectories() -> None:
    episodes = [make_trajectory(0, 1.0) for _ in range(5)]
    for episode, kept in zip(episodes, (None, 0, 1, 1, 1), strict=True):
        episode.kept_turns = kept
    episodes[4].append_observation({}, [1])
    counts = EpisodeCounts.of([[episode] for episode in episodes])
    assert (counts.replayed, counts.ended_before, counts.replay_refused) == (1, 2, 1)
    assert (counts + counts).ended_before == 4
