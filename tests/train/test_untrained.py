"""Episodes of a step that the run does not complete can be loaded again. They were lost when a signal came."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import make_trajectory, make_writer
from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import Trajectory, read_jsonl
from verl_server.train.checkpoints import Progress, write_progress
from verl_server.train.evaluation import Evaluations
from verl_server.train.options import TrainArgs
from verl_server.train.run import _run_steps
from verl_server.train.run_folder import RunFolder
from verl_server.train.run_writer import RunWriter
from verl_server.train.stopping import RunStoppedError, StopRequest
from verl_server.watch.recorded import read_recorded


class Run:
    """A run that ends in step 3, before or after the step was trained on."""

    def __init__(self, is_trained: bool) -> None:
        self.next_step = 3
        self.played = [make_trajectory(0, 1.0), make_trajectory(0, 0.0)]
        self._is_trained = is_trained

    def step(self, on_finish: Callable[[Trajectory], None]) -> None:
        for trajectory in self.played:
            on_finish(trajectory)
        self.next_step += self._is_trained
        raise RunStoppedError("The run was stopped by SIGTERM.")


def end(folder: Path, is_trained: bool = False) -> Run:
    run: Any = Run(is_trained)
    advisor: Any = None
    ranks: Any = None
    trackers: Any = None
    args = TrainArgs(model_path="unused", env_url="http://unused", steps=9)
    with pytest.raises(RunStoppedError):
        files, writer = RunWriter(folder, "00000001"), make_writer(run, folder)
        _run_steps(args, run, files, StopRequest(), writer, advisor, Evaluations(args, files, ranks), trackers)
    return run


def test_episodes_of_a_step_that_is_not_completed_are_kept(tmp_path: Path, one_rank: None) -> None:
    run = end(tmp_path)
    file = tmp_path / "untrained-rank0.jsonl"
    assert read_jsonl(file) == run.played
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [3, 3]
    (tmp_path / "checkpoint-3").mkdir()
    write_progress(tmp_path / "checkpoint-3", Progress(3, 3))
    RunFolder(tmp_path).resume()
    assert read_jsonl(file) == run.played
    with pytest.raises(BadRequestError, match=r"already holds a run \(untrained-rank0"):
        RunFolder(tmp_path).start()


def test_episodes_that_were_trained_on_are_those_of_the_step(tmp_path: Path, one_rank: None) -> None:
    """The step is not run again: its push failed, and its weights are saved."""
    run = end(tmp_path, is_trained=True)
    assert [r.trajectory for r in read_recorded(tmp_path, step=3)] == run.played
    assert not (tmp_path / "untrained-rank0.jsonl").exists()


def test_a_full_disk_does_not_hide_the_error(tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "untrained-rank0.jsonl").mkdir()  # writing fails
    with caplog.at_level(logging.ERROR):
        end(tmp_path)
    assert "2 episodes of step 3 are lost" in caplog.text
