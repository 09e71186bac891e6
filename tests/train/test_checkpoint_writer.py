"""Checkpoints are written while the steps go on, one at a time, and nothing relies on one before it is on the disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import make_writer
from tests.train.test_checkpoints import load, make_trainer, train
from verl_server.train import checkpoint_writer
from verl_server.train.checkpoint_writer import CheckpointWriter
from verl_server.train.checkpoints import CheckpointError, Progress, checkpoints_of, latest_checkpoint, step_of
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.run_end import Progressing
from verl_server.watch.run_records import CheckpointSaved, RunEvent

pytestmark = pytest.mark.usefixtures("one_rank")


class Run:
    """Stands for an algorithm. `log` has what happened, in order."""

    def __init__(self, trainer: PolicyTrainer, log: list[str]) -> None:
        self.state = trainer.state
        self.log = log

    def checkpoint(self, reached: Progressing) -> Progress:
        self.log.append(f"begun {reached.next_step}")
        return self.state.progress(reached)

    def saved(self, progress: Progress) -> None:
        self.log.append(f"saved {progress.next_step}")


class Disk:
    """A disk on which no checkpoint is written by a thread before `answers` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
        self.answers = threading.Event()
        self.log = log
        write = checkpoint_writer.write_checkpoint

        def slow(out: Path, state: dict[str, Any], progress: Progress, *rest: Any) -> Path:
            if threading.current_thread().name == checkpoint_writer.THREAD:
                assert self.answers.wait(60)
            folder = write(out, state, progress, *rest)
            log.append(f"written {progress.next_step}")
            return folder

        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", slow)

    def answers_a_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer when somebody begins to wait for the thread."""
        wait = checkpoint_writer._Write.wait

        def waits(write: Any, timeout: float) -> None:
            if not self.answers.is_set():
                self.log.append("waits")
            self.answers.set()
            wait(write, timeout)

        monkeypatch.setattr(checkpoint_writer._Write, "wait", waits)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> Iterator[Disk]:
    disk = Disk(monkeypatch, log)
    yield disk
    disk.answers.set()
    for thread in threading.enumerate():
        if thread.name == checkpoint_writer.THREAD:
            thread.join(60)


def at(step: int) -> Progressing:
    return Progressing(step, step)


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.policy.named_weights()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def saved_steps(out: Path) -> list[int]:
    return sorted(step_of(folder) for folder in checkpoints_of(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_go_on_while_a_checkpoint_is_written(
    policy_folder: Path, tmp_path: Path, disk: Disk, log: list[str], dtype: torch.dtype
) -> None:
    """The checkpoint has the weights of its step, and a run that continues from it is the run."""
    trainer, events = make_trainer(policy_folder, dtype), list[RunEvent]()
    writer = make_writer(Run(trainer, log), tmp_path, note=events.append)
    train(trainer, 0, 1)
    before = weights(trainer)
    writer.begin(at(1))
    train(trainer, 1, 2)
    after = weights(trainer)
    writer.settle()
    assert log == ["begun 1"] and not events and latest_checkpoint(tmp_path) is None
    disk.answers.set()
    writer.settle(wait=True)
    assert log == ["begun 1", "written 1", "saved 1"]
    (event,) = events
    assert isinstance(event, CheckpointSaved) and event.name == "checkpoint-1"
    assert event.held_seconds is not None and event.seconds > 0 and event.held_seconds > 0
    resumed = make_trainer(policy_folder, dtype)
    load(resumed, tmp_path / "checkpoint-1")
    assert same(weights(resumed), before) and not same(before, after)
    train(resumed, 1, 2)
    assert same(weights(resumed), after)


@pytest.mark.parametrize("next_save", [CheckpointWriter.begin, CheckpointWriter.finish])
def test_the_next_save_waits(
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk: Disk,
    log: list[str],
    next_save: Callable[[CheckpointWriter, Progressing], None],
) -> None:
    """So does the end of the run, which then writes its own state."""
    disk.answers_a_wait(monkeypatch)
    trainer = make_trainer(policy_folder)
    writer = make_writer(Run(trainer, log), tmp_path)
    writer.begin(at(1))
    train(trainer, 0, 1)
    next_save(writer, at(2))
    writer.close()
    first = ["begun 1", "waits", "written 1", "saved 1"]
    assert log == [*first, "begun 2", "written 2", "saved 2"] and saved_steps(tmp_path) == [2]
    resumed = make_trainer(policy_folder)
    load(resumed, tmp_path / "checkpoint-2")
    assert same(weights(resumed), weights(trainer))


def test_older_checkpoints_go_when_the_new_one_is_on_the_disk(
    policy_folder: Path, tmp_path: Path, disk: Disk, log: list[str]
) -> None:
    trainer = make_trainer(policy_folder)
    writer = make_writer(Run(trainer, log), tmp_path)
    writer.finish(at(1))
    writer.begin(at(2))
    writer.settle()
    assert saved_steps(tmp_path) == [1] and log[-1] == "begun 2"
    disk.answers.set()
    writer.close()
    assert saved_steps(tmp_path) == [2] and not list(tmp_path.glob(".checkpoint*"))


def test_a_full_disk_ends_the_run_at_the_next_boundary(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """Nothing happens that needs the checkpoint. The end of the run tries again."""
    trainer, recorded = make_trainer(policy_folder), list[str]()
    writer = make_writer(Run(trainer, log), tmp_path)
    writer.finish(at(1))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.begin(at(2))
        writer.when_saved(lambda: recorded.append("an evaluation"))
        message = "checkpoint-2 could not be written .*No space left on device.* checkpoint-1 is still valid"
        with pytest.raises(CheckpointError, match=message.replace(" checkpoint-1", ".*checkpoint-1")):
            writer.settle(wait=True)
    assert log == ["begun 1", "saved 1", "begun 2"] and not recorded and saved_steps(tmp_path) == [1]
    writer.finish(at(3))
    assert log[3:] == ["begun 3", "saved 3"] and not recorded and saved_steps(tmp_path) == [3]


def test_a_failure_that_nobody_has_seen_does_not_hinder_the_end(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str], caplog: Any
) -> None:
    writer = make_writer(Run(make_trainer(policy_folder), log), tmp_path)
    write = checkpoint_writer.write_checkpoint

    def fails(out: Path, state: Any, progress: Progress, *rest: Any) -> Path:
        if progress.next_step == 1:
            raise CheckpointError("checkpoint-1 could not be written")
        return write(out, state, progress, *rest)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", fails)
    writer.begin(at(1))
    writer.finish(at(2))
    assert log == ["begun 1", "begun 2", "saved 2"] and "checkpoint-1 could not be written" in caplog.text


def test_a_disk_that_does_not_answer_is_waited_for_once(
    policy_folder: Path, tmp_path: Path, disk: Disk, log: list[str], caplog: Any
) -> None:
    writer = make_writer(Run(make_trainer(policy_folder), log), tmp_path, timeout=0.01)
    writer.begin(at(1))
    message = r"checkpoint-1 was not written within 0\.01 s\..* larger --save-timeout"
    for save in (writer.begin, writer.finish):
        with pytest.raises(CheckpointError, match=message):
            save(at(2))
    writer.close()
    assert log == ["begun 1"] and "checkpoint-1 was not written" in caplog.text


def test_what_is_recorded_of_a_checkpoint_waits_for_it(
    policy_folder: Path, tmp_path: Path, disk: Disk, log: list[str]
) -> None:
    writer = make_writer(Run(make_trainer(policy_folder), log), tmp_path)
    writer.when_saved(lambda: log.append("nothing is being written"))
    writer.begin(at(1))
    writer.when_saved(lambda: log.append("evaluation"))
    writer.settle()
    assert log == ["nothing is being written", "begun 1"]
    disk.answers.set()
    writer.settle(wait=True)
    assert log[2:] == ["written 1", "saved 1", "evaluation"]


def test_without_a_background_there_is_no_copy(policy_folder: Path, tmp_path: Path, disk: Disk, log: list[str]) -> None:
    """The disk never answers a thread."""
    events: list[Any] = []
    writer = make_writer(Run(make_trainer(policy_folder), log), tmp_path, in_background=False, note=events.append)
    assert writer._copy is None
    writer.begin(at(1))
    assert log == ["begun 1", "written 1", "saved 1"] and saved_steps(tmp_path) == [1]
    assert 0 < events[0].seconds <= events[0].held_seconds
