"""What `benchmarks.kill_points` calls a problem, and how it goes on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.group_fates import evaluation_counts
from benchmarks.kill_points import Args, _cases, _results, problems
from benchmarks.killed_trainer import ASYNC, POINTS, SYNC
from tests.train.test_evaluations import FIRST, SECOND, evaluated
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import RunResumed, RunStarted

GOOD: dict[str, Any] = {"killed": True, "ended": True, "lost_groups": [], "twice": [], "wrong": [], "best_error": None}


def test_a_case_without_a_fault_has_no_problem() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"killed": False, "ended": False}, ["the trainer did not reach the point"]),
        ({"ended": False}, ["the resumed run did not end"]),
        ({"twice": [7]}, ["twice: [7]"]),
        ({"lost_groups": [8]}, ["lost_groups: [8]"]),
        ({"wrong": [2]}, ["wrong: [2]"]),
        ({"best_error": "the checksum is wrong"}, ["best_error: the checksum is wrong"]),
    ],
)
def test_each_fault_is_a_problem(fault: dict[str, Any], says: list[str]) -> None:
    assert problems(GOOD | fault) == says


def test_evaluations_count_if_they_are_complete_and_their_weights_are_there(tmp_path: Path) -> None:
    RunWriter(tmp_path, FIRST).begin(RunStarted(ranks=1, version="1"))
    more = {"version": "1", "failed": 0, "success": 0.5, "push_delay": 0.0}
    for step, incomplete in ((0, None), (2, "timeout"), (2, None), (2, None), (4, None)):
        evaluated(tmp_path, step, 0.5, incomplete=incomplete, **more)
    RunWriter(tmp_path, SECOND).begin(RunResumed(ranks=1, version="1", next_step=2, checkpoint="checkpoint-2"))
    assert evaluation_counts(tmp_path) == {0: 1, 2: 2}


def test_cases_are_those_that_a_trainer_has_and_lines_that_were_cut_off_do_not_count(tmp_path: Path) -> None:
    settings: Any = None
    names = [case.name for case in _cases(Args(ranks=(1, 2), random=1), settings)]
    assert len(names) == len(set(names)) == 2 * (2 * len(POINTS) - 1 + 2)
    assert f"{ASYNC}-2-held-push" in names and f"{SYNC}-2-held-push" not in names
    without = _cases(Args(eval_every=0), settings)
    assert without and not any(POINTS[case.point].evaluates for case in without)
    (tmp_path / "results.jsonl").write_text(json.dumps({"case": "grpo-1-save"}) + '\n{"case": "grpo-1-pu')
    assert list(_results(tmp_path)) == ["grpo-1-save"]
