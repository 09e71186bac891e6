"""A short run of the demo: the files that it writes, and that an interrupt leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.train.trackers.fake_packages import FakePackages
from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import read_jsonl
from verl_server.train.demo import DemoArgs
from verl_server.train.demo_evaluation import success_rate

_DEMO = ("verl_server", "demo", "--latency", "0.002", "--episodes", "24")


def _descendants(pid: int) -> set[int]:
    """Return the ids of all descendants of process `pid`, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _short_demo(out: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Run a demo that is too short to learn the game. Return (what it printed, its summary)."""
    settings = ["--out", str(out), "--pace-episodes", "16", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    demo = fork_server.run_module(*_DEMO, *settings, **pipes)
    printed, log = demo.communicate(timeout=240)
    assert demo.returncode == 1, log[-4000:]
    assert "success on held-out seeds" in printed
    return printed, json.loads((out / "summary.json").read_text())


@pytest.mark.timeout(300)
def test_a_short_demo_leaves_its_results(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    _, summary = _short_demo(out, "--steps", "2")
    assert summary["asynchronous"] is None
    assert summary["steps"] == 2
    assert summary["weight_pushes"] == 3
    assert summary["eval_success_before"] <= 0.5
    assert 0 < summary["max_logprob_gap"] < 1e-4
    assert summary["best_without_feedback"] < 0.5
    assert summary["lockstep_ratio"] > 0
    assert summary["ideal_seconds"] == max(summary["longest_alone_seconds"], summary["work_seconds"])
    assert summary["same_trajectories"] >= 15
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["weight_version"].partition("@")[0] for line in lines] == ["0", "1"]
    trajectories = read_jsonl(out / "trajectories.jsonl")
    assert success_rate(trajectories[:24]) == pytest.approx(summary["eval_success_before"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""<[^>]*\s(src|href)=["'](?!data:|#)""", page.partition("<script")[0])
    assert "From random weights to a policy that listens" in page and '"/api/runs"' in page


@pytest.mark.timeout(300)
def test_trackers_get_the_steps_and_both_evaluations_of_a_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packages").mkdir()
    packages = FakePackages(tmp_path / "packages", monkeypatch)
    out = tmp_path / "first-try"
    options = ("--out", str(out), "--steps", "2", "--pace-episodes", "16", "--logger", "trackio")
    demo = subprocess.Popen([sys.executable, "-m", *_DEMO, *options], stdout=subprocess.DEVNULL)
    assert demo.wait(240) == 1, capfd.readouterr().err[-4000:]
    (opened,) = packages.calls("trackio", "init")
    assert opened["name"] == "first-try" and opened["config"]["command"] == "demo" and opened["config"]["steps"] == 2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert packages.logged("trackio") == [(line["step"], line["reward"]) for line in lines]
    summary = json.loads((out / "summary.json").read_text())
    evaluated = [(0, summary["eval_success_before"]), (2, summary["eval_success_after"])]
    assert packages.logged("trackio", "evaluation/success") == evaluated
    assert len(packages.calls("trackio", "finish")) == 1


@pytest.mark.timeout(300)
def test_a_short_asynchronous_demo_shows_the_ages_of_its_episodes(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    printed, summary = _short_demo(out, "--steps", "3", "--async", "--max-staleness", "2")
    assert "ages of the episodes" in printed
    assert "idle trainer / server" in printed
    found = summary["asynchronous"]
    episodes = summary["episodes_played"]
    assert episodes == 3 * 256
    assert found["max_staleness"] == 2
    assert sum(found["ages"].values()) == sum(found["version_spans"].values()) == episodes
    assert found["ages"].keys() <= {"0", "1", "2"}
    assert found["ages"]["0"] >= 256  # the first step has the first version only
    assert found["idle"].keys() == {"trainer", "servers"}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["weight_version"].partition("@")[0] for line in lines] == ["0", "1", "2"]
    assert summary["weight_pushes"] == 4
    assert 0 < summary["max_logprob_gap"] < 1e-4
    assert "How old the episodes were" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("--async",)], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, how: signal.Signals, options: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", *_DEMO, "--out", str(tmp_path / "demo"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "step   0" in line:
                break
        children = _descendants(process.pid)
        # Environment server, rollout server and the server's scheduler, and the rollout process.
        assert len(children) >= 3 + len(options)
        process.send_signal(how)
        process.wait(timeout=30)
        deadline = time.monotonic() + 30
        while alive := {pid for pid in children if _is_running(pid)}:
            assert time.monotonic() < deadline, f"still running: {alive}"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(timeout=10)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_settings_that_make_no_game_are_refused() -> None:
    for settings in (
        {"guesses": 13},
        {"numbers": 60},
        {"guesses": 1},
        {"latency": -1.0},
        {"steps": 0},
        {"max_staleness": 2},
    ):
        with pytest.raises(BadRequestError):
            DemoArgs(**settings)  # type: ignore[arg-type]
