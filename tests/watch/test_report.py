"""The report is one page without external resources, and shows the measured values."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory
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


def test_the_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, report())
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", page)
    links = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert links <= {"http://www.w3.org/2000/svg"}
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert page.count("<svg") == 5
    for said in ("10% → 97%", "2.5\u00d7", "env_error", "guess &lt;b&gt;", "0.385", "10.0 ms"):
        assert said in page
    assert "<b>" not in re.sub(r"<div class=\"tile\"><b>", "", page)  # text of the environment is escaped


def test_ticks_are_round() -> None:
    assert charts.ticks(4.3) == [0, 2, 4, 6]
    assert charts.ticks(1.0) == [0, 0.25, 0.5, 0.75, 1.0]
    assert charts.ticks(0.0) == [0, 1]
