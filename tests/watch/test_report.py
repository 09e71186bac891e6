"""The report is one page without external resources, and shows the measured values."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory
from verl_server.train.demo_display import dialogue
from verl_server.watch import charts
from verl_server.watch.pace import PaceComparison
from verl_server.watch.report import Report, write_report


def trajectory(seed: int, said: str, reward: float | None) -> Trajectory:
    t = Trajectory(
        task=Task(seed=seed), events=[Event("env", 0.0, 0.5 + seed), Event("generate", 0.5 + seed, 1.0 + seed)]
    )
    t.append_observation({"text": "guess <b>"}, [1, 2])
    t.append_output([3], [-0.7], ["1"])
    t.turns[0].action = {"text": said}
    t.turns[0].reward = reward
    t.final_observation = {"text": "correct"}
    t.finish(StopReason.DONE if reward is not None else StopReason.ENV_ERROR)
    return t


def report() -> Report:
    before, after = [trajectory(i, "what", 0.0) for i in range(3)], [trajectory(i, "7", 1.0) for i in range(3)]
    before[1] = trajectory(1, "what", None)
    metrics = {
        "success": 0.5, "reward": None, "sync_seconds": 0.01, "train_seconds": 0.1, "rollout_seconds": 1.0,
        "env_seconds": 0.6, "generate_seconds": 0.2, "logprob_gap": 0.0, "skipped": None,
    }  # fmt: skip
    pace = PaceComparison(after, before, 1.0, 2.5, 0.8, 0.4, 3)
    summary = {
        "eval_success_before": 0.1, "eval_success_after": 0.97, "best_without_feedback": 0.385,
        "best_without_feedback_hindsight": 0.41, "seconds": 99.0, "steps": 2, "lockstep_ratio": pace.ratio,
        "ideal_ratio": pace.ideal_ratio, "lockstep_seconds": 2.5, "own_pace_seconds": 1.0, "ideal_seconds": 0.8,
        "longest_alone_seconds": 0.8, "work_seconds": 0.4, "same_trajectories": 3, "pace_episodes": 3,
        "weight_pushes": 3, "push_ms_median": 10.0, "push_ms_max": 12.0, "max_logprob_gap": 2e-6,
        "episodes_played": 100, "episodes_failed": 1,
    }  # fmt: skip
    skipped = metrics | {"logprob_gap": None, "sync_seconds": 0.0, "skipped": "every episode failed"}
    history = [metrics, skipped, metrics | {"reward": 0.4, "logprob_gap": 2e-6}]
    return Report(summary, history, pace, before, after, {"game": "g", "policy": "p", "waits": "w"})


def report_of(path: Path) -> str:
    """Return the first tab of an exported page: what `write_report` made."""
    page = path.read_text(encoding="utf-8")
    _, begins, rest = page.partition('<div id="report" hidden>')
    report, ends, _ = rest.partition('<script type="application/json"')
    assert begins and ends
    return report


def test_the_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, report())
    page = report_of(path)
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", page)
    links = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert links <= {"http://www.w3.org/2000/svg"}
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert page.count("<svg") == 5
    for said in ("10% → 97%", "2.5\u00d7", "env_error", "guess &lt;b&gt;", "0.385", "10.0 ms"):
        assert said in page
    assert "<b>" not in re.sub(r"<div class=\"tile\"><b>", "", page)  # text of the environment is escaped


def asynchronous_report() -> Report:
    """Return the report of a run whose second step waited for a deadline, and whose server told its idle share then."""
    plain = report()
    ages = {"ages": {"0": 6, "2": 2}, "version_spans": {"1": 6, "2": 1, "7": 1}, "waits": {"episodes": 1.5}, "idle": {}}
    first = plain.history[0] | ages
    second = first | {"waits": {"deadline": 2.5}, "idle": {"trainer": 0.75, "servers": 0.125}}
    summary = plain.summary | {
        "train_seconds": 9.0,
        "asynchronous": {
            "max_staleness": 2, "ages": {"0": 12, "2": 4}, "version_spans": {"1": 12, "2": 2, "7": 2},
            "waits": {"deadline": 2.5, "episodes": 1.5}, "idle": {"trainer": 0.75, "servers": 0.125},
        },
    }  # fmt: skip
    return replace(plain, summary=summary, history=[first, second])


def test_the_page_of_an_asynchronous_run_has_ages_versions_waits_and_idle_shares(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, asynchronous_report())
    page = report_of(path)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert len(drawings) == 9
    for said in (
        "step 0, age 2: 25%", "step 1, 4 versions or more: 12%", "25% of the episodes are of two versions or more",
        "12% of three or more", "trainer idle 75%", "rollout server idle 12%", "mean is 0.50",
        "step 1, waiting for a group at its deadline: 2.50 s", "waiting for episodes 1.5 s", "other work 4.8 s",
    ):  # fmt: skip
        assert said in page
    assert "age 1<" not in page  # no episode had this age


def test_a_report_of_a_synchronous_run_has_no_ages(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, report())
    assert "How old" not in report_of(path)


def test_an_episode_that_could_not_begin_has_its_place_in_the_page(tmp_path: Path) -> None:
    unbegun = Trajectory(task=Task(seed=0))
    unbegun.finish(StopReason.ENV_TIMEOUT, "the environment server did not answer")
    shown = report()
    write_report(tmp_path / "report.html", replace(shown, before=[unbegun, *shown.before[1:]]))
    assert "<span class='verdict'>env_timeout</span>" in report_of(tmp_path / "report.html")
    assert dialogue(unbegun).plain == "a game  "


def test_ticks_are_round() -> None:
    assert charts.ticks(4.3) == [0, 2, 4, 6]
    assert charts.ticks(1.0) == [0, 0.25, 0.5, 0.75, 1.0]
    assert charts.ticks(0.0) == [0, 1]
