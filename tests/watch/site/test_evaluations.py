"""Evaluations on held-out tasks: their list, their episodes among the steps, and their time in the lanes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import pytest

from tests.watch.site.conftest import Site
from tests.watch.site.recorded_runs import BEGAN, FIRST, SECOND, evaluate, write_run, write_steps
from tests.watch.site.test_export import parts_of
from verl_server.train.run_writer import RunWriter
from verl_server.watch.index.run_tail import RunTail, StepTimes
from verl_server.watch.run_records import EvaluationBegan, EvaluationEnded, RunResumed, RunStarted, StepBegan, StepEnded
from verl_server.watch.site import export
from verl_server.watch.site.runs import OpenRuns

OpenSite = Callable[..., Site]


def test_evaluations_are_listed_with_the_best_one_and_its_checkpoint(open_site: OpenSite, tmp_path: Path) -> None:
    files = write_run(tmp_path, 3, ends=False)
    evaluate(files, 0, [0.0, 1.0])
    evaluate(files, 1, [1.0, 1.0], seconds=2.5, push_delay=0.5, failed=2)
    evaluate(files, 2, [1.0, 1.0, 1.0])
    evaluate(files, 3, [3.0], incomplete="timeout", unfinished=2)
    files.close()
    for name in ("checkpoint-2", "checkpoint-3", ".checkpoint-1.partial", "checkpoint-x"):
        (tmp_path / name).mkdir()
    found = open_site(tmp_path).get("/evaluations")
    shown = [(e["step"], e["reward"], e["best"], e["checkpoint"]) for e in found["evaluations"]]
    assert shown == [(0, 0.5, False, False), (1, 1.0, False, False), (2, 1.0, True, True), (3, 3.0, False, True)]
    second = found["evaluations"][1]
    assert (second["version"], second["episodes"], second["failed"]) == (f"1@{FIRST}", 2, 2)
    assert (second["seconds"], second["push_delay"], second["incomplete"]) == (2.5, 0.5, None)
    assert (found["evaluations"][3]["incomplete"], found["evaluations"][3]["unfinished"]) == ("timeout", 2)
    assert (found["playing"], found["next"]) == (None, None)


def test_a_long_list_of_evaluations_is_paged(open_site: OpenSite, tmp_path: Path) -> None:
    files = RunWriter(tmp_path, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    for step in range(900):
        evaluate(files, step, [], incomplete="x" * 1000)
    files.close()
    site = open_site(tmp_path)
    steps, after = [], 0
    while after is not None:
        page = site.get(f"/evaluations?after={after}" if after else "/evaluations")
        steps += [each["step"] for each in page["evaluations"]]
        after = page["next"]
    assert steps == list(range(900))


def test_the_evaluations_of_lost_steps_are_left_out(open_site: OpenSite, tmp_path: Path) -> None:
    files = write_run(tmp_path, 4, ends=False)
    evaluate(files, 2, [1.0])
    evaluate(files, 4, [2.0])
    files.close()
    again, other = RunWriter(tmp_path, SECOND, ranks=2), RunWriter(tmp_path, SECOND, rank=1, ranks=2)
    again.begin(RunResumed(ranks=2, version="1", next_step=2, checkpoint="checkpoint-2"))
    write_steps(again, other, 2, 4)
    evaluate(again, 4, [0.5])
    again.close()
    other.close()
    site = open_site(tmp_path)
    shown = [(each["step"], each["reward"], each["best"]) for each in site.get("/evaluations")["evaluations"]]
    assert shown == [(2, 1.0, True), (4, 0.5, False)]
    assert site.get("/steps/held-out-4")["step"]["episodes"] == 1
    assert len(site.get("/episodes?lost=1&step=held-out-4")["rows"]) == 2
    assert len(site.get("/lanes")["evaluations"]) == 3, "lanes have lost steps, too"


def test_the_episodes_of_an_evaluation_are_a_place_among_the_steps(open_site: OpenSite, tmp_path: Path) -> None:
    files = write_run(tmp_path, 2, ends=False)
    for step in (0, 1, 2):
        evaluate(files, step, [0.0, float(step)])
    files.close()
    site = open_site(tmp_path)
    places = [row["step"] for row in site.get("/steps")["steps"]]
    assert places == [0, 1, "held-out-0", "held-out-1", "held-out-2"]
    found = site.get("/steps/held-out-1?sort=number")
    assert (found["previous_step"], found["next_step"]) == ("held-out-0", "held-out-2")
    assert site.get("/steps/1")["next_step"] is None, "the neighbours of a step are steps"
    assert [(group["number"], group["mean"]) for group in found["groups"]] == [(0, 0.0), (1, 1.0)]
    row = found["groups"][1]["episodes"][0]
    assert (row["name"], row["step"], row["kind"]) == ("1-0", "held-out-1", "held-out")
    assert site.get(f"/episodes/{quote(row['row'], safe='')}")["row"]["step"] == "held-out-1"
    compared = site.get("/compare?a=held-out-0&b=held-out-2")
    assert compared["common"] == 2 and [pair["b"]["mean"] for pair in compared["pairs"]] == [2.0, 0.0]
    assert site.request(f"/api/runs/{site.run}/steps/held-out-9").status_code == 404


def test_an_export_has_evaluations_and_the_newest_of_their_episodes_first(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run", 3, ends=False)
    for step in (0, 3):
        evaluate(files, step, [1.0])
    files.close()
    runs = OpenRuns([tmp_path / "run"], follow=False)
    runs.poll()
    export.write_export(tmp_path / "page.html", runs)
    (run,) = runs.runs.values()
    names = export._newest_first(run)
    runs.close()
    assert names == ["2", "held-out-3", "1", "0", "held-out-0"]
    _, _, answers = parts_of(tmp_path / "page.html")
    assert len(answers[f"/api/runs/{run.id}/evaluations"]["evaluations"]) == 2
    assert f"/api/runs/{run.id}/steps/held-out-0" in answers


class Recorder:
    """Writes events at given times."""

    def __init__(self, folder: Path) -> None:
        self.files, self._now = RunWriter(folder, FIRST), 0.0
        with self.at(0.0):
            self.files.begin(RunStarted(ranks=1, version="1"))

    def at(self, second: float) -> Any:
        self._now = BEGAN + second
        return patch("verl_server.train.run_writer.time.time", lambda: self._now)

    def step(self, step: int, began: float, ended: float, **phases: float) -> None:
        with self.at(began):
            self.files.note(StepBegan(step=step))
        with self.at(ended):
            self.files.note(StepEnded(step=step, phases=phases))

    def begin(self, step: int, began: float) -> None:
        """Write the begin of an evaluation."""
        with self.at(began):
            self.files.note(EvaluationBegan(step=step, version=f"{step}@{FIRST}"))

    def end(self, step: int, noted: float, **fields: Any) -> None:
        """Write the result of an evaluation."""
        with self.at(noted):
            evaluate(self.files, step, [1.0], begins=False, **fields)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def relative(spans: list[Any]) -> list[tuple[Any, ...]]:
    return [(kind, round(begin - BEGAN, 3), round(end - BEGAN, 3), step) for kind, begin, end, step in spans]


def test_an_evaluation_between_two_steps_is_what_the_trainer_waits_for(
    open_site: OpenSite, tmp_path: Path, recorder: Recorder
) -> None:
    recorder.begin(0, 1.0)
    recorder.end(0, 5.0, seconds=4.0, push_delay=4.0)
    recorder.step(0, 5.0, 10.0, rollout=3.0, train=2.0)
    recorder.step(1, 10.0, 15.0, rollout=3.0, train=2.0)
    recorder.files.close()
    site = open_site(tmp_path)
    lanes = site.get("/lanes")
    assert relative(lanes["trainer"])[0] == ("evaluation", 1.0, 5.0, 0)
    assert [phase[0] for phase in lanes["trainer"]] == ["evaluation", *["rollout", "train"] * 2]
    (span,) = lanes["evaluations"]
    assert (span["step"], span["reward"], span["push_delay"], span["end"] - span["begin"]) == (0, 1.0, 4.0, 4.0)
    part = site.get(f"/lanes?from={BEGAN + 3}&to={BEGAN + 12}")
    assert relative(part["trainer"])[0] == ("evaluation", 3.0, 5.0, 0), "the steps before the window are not known"
    assert site.get(f"/lanes?from={BEGAN + 6}&to={BEGAN + 12}")["evaluations"] == []


def test_an_evaluation_beside_steps_holds_a_push(open_site: OpenSite, tmp_path: Path, recorder: Recorder) -> None:
    """Its result is noted when the trainer looks. After the last step, the trainer waits for it."""
    recorder.begin(0, 1.0)
    recorder.step(0, 1.01, 10.0, rollout=2.0, train=3.0, held=3.0, sync=1.0)
    recorder.end(0, 9.0, seconds=6.0, push_delay=3.0)
    recorder.begin(1, 10.0)
    recorder.end(1, 14.0, seconds=4.0)
    recorder.files.close()
    lanes = open_site(tmp_path).get("/lanes")
    assert relative(lanes["trainer"]) == [
        ("rollout", 1.01, 3.0, 0), ("train", 3.0, 6.0, 0), ("held", 6.0, 9.0, 0), ("sync", 9.0, 10.0, 0),
        ("evaluation", 10.0, 14.0, 1),
    ]  # fmt: skip
    assert [(each["begin"] - BEGAN, each["end"] - BEGAN) for each in lanes["evaluations"]] == [(1.0, 7.0), (10.0, 14.0)]


def test_lanes_show_the_evaluation_that_plays(
    open_site: OpenSite, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.step(0, 1.0, 2.0, train=1.0)
    recorder.begin(1, 2.0)
    with recorder.at(6.0):
        recorder.files.note(EvaluationEnded(step=0, version="", seconds=0.0, push_delay=0.0, reward=None))
    recorder.files.close()
    monkeypatch.setattr("verl_server.watch.index.run_tail.state_of", lambda *_: "running")
    site = open_site(tmp_path)
    assert site.get("/evaluations")["playing"] == 1
    (span,) = site.get("/lanes")["evaluations"]
    assert (span["begin"] - BEGAN, span["end"] - BEGAN, span["reward"]) == (2.0, 6.0, None)


def test_with_too_many_steps_nothing_is_said_about_the_time_between_them(
    open_site: OpenSite, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.begin(0, 1.0)
    recorder.end(0, 5.0, seconds=4.0)
    recorder.files.close()

    def many(self: RunTail, begin: float, end: float, limit: int) -> list[StepTimes]:
        times = {"incarnation": FIRST, "began": BEGAN, "ended": BEGAN, "phases": {}, "is_lost": False}
        return [StepTimes(step=step, **times) for step in range(limit)]

    monkeypatch.setattr(RunTail, "steps_between", many)
    lanes = open_site(tmp_path).get("/lanes")
    assert lanes["trainer"] == [] and len(lanes["evaluations"]) == 1


def test_a_file_of_trajectories_has_no_evaluations(open_site: OpenSite, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("")
    assert open_site(tmp_path / "out.jsonl").get("/evaluations") == json.loads(
        '{"evaluations": [], "playing": null, "next": null}'
    )
