"""The best evaluated step: the highest reward of complete evaluations of weights that the run still has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_server.errors import BadRequestError
from verl_server.train.evaluations import best_evaluated_step
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import RunResumed, RunStarted

FIRST, SECOND = "00000001", "00000002"


def evaluated(out: Path, step: int, reward: float | None, incarnation: str = FIRST, **more: Any) -> None:
    """Append the line of an evaluation."""
    line = {"step": step, "reward": reward, "incarnation": incarnation, "episodes": 8, "seconds": 1.0} | more
    with (out / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_highest_reward_is_the_best_and_the_later_of_two(tmp_path: Path) -> None:
    assert best_evaluated_step(tmp_path) is None
    for step, reward in ((10, 0.25), (20, 0.5), (30, 0.5), (40, 0.375)):
        evaluated(tmp_path, step, reward, incomplete=None)
    assert best_evaluated_step(tmp_path) == 30
    assert best_evaluated_step(tmp_path, among=[10, 40]) == 40
    assert best_evaluated_step(tmp_path, among=[50]) is None


def test_what_is_incomplete_or_has_no_reward_does_not_count(tmp_path: Path) -> None:
    evaluated(tmp_path, 10, -2.0)
    evaluated(tmp_path, 20, 0.9, incomplete="timeout")
    evaluated(tmp_path, 30, None)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 40, "rew')  # cut off
    assert best_evaluated_step(tmp_path) == 10


def test_evaluations_of_lost_weights_do_not_count(tmp_path: Path) -> None:
    """The second start runs step 20 again: the weights that step 19 made are still there, those of step 29 are not."""
    RunWriter(tmp_path, FIRST).begin(RunStarted(ranks=1, version="1"))
    for step, reward in ((10, 0.25), (20, 0.5), (30, 0.75)):
        evaluated(tmp_path, step, reward)
    RunWriter(tmp_path, SECOND).begin(RunResumed(ranks=1, version="1", next_step=20, checkpoint="checkpoint-20"))
    assert best_evaluated_step(tmp_path) == 20
    evaluated(tmp_path, 30, 0.625, SECOND)
    assert best_evaluated_step(tmp_path) == 30


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"reward": 1.0}\n')
    with pytest.raises(BadRequestError, match=r"evaluations\.jsonl:1: .*step"):
        best_evaluated_step(tmp_path)
