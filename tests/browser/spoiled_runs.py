"""Folders of runs with the three faults of `benchmarks.spoiled_runs`, written at once. Nothing is trained.

The runs wrote no advisories, so the page computes them from metrics.jsonl.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.browser.guessing import fail, play, write_tokenizer
from tests.watch.site.recorded_runs import FIRST, step_metrics
from verl_server.files.run_output import store_settings
from verl_server.rollout.trajectory import Task, Trajectory
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import RunEnded, RunStarted, StepBegan, StepEnded

STEPS, GROUPS, MEMBERS = 6, 8, 8
EPISODES = GROUPS * MEMBERS
DISK_FULL = "ws://127.0.0.1:40261/ws reports EXECUTION_ERROR: RuntimeError: the sandbox is out of disk space"
RATE = 0.4
"""A hundred times the learning rate of the demo."""


def write_failing_run(folder: Path) -> None:
    """Write a run in which each fifth episode fails."""
    _write(folder, fails=True, failed=12, failures={"infrastructure": 12}, stop_reasons={"done": 52, "env_error": 12})


def write_zero_run(folder: Path) -> None:
    """Write a run whose environment says that answers are correct, and pays nothing."""
    flat = {"groups": GROUPS, "groups_without_spread": GROUPS, "reward_min": 0.0, "reward_max": 0.0}
    _write(folder, pays=False, reward=0.0, trainable=EPISODES, **flat)


def write_rate_run(folder: Path) -> None:
    """Write a run whose policy jumps away from the one that sampled, in its second step."""
    _write(folder, kl=(0.3, 3.6, 11.0, 8.4, 9.1, 7.5), groups=GROUPS, trainable=EPISODES, groups_without_spread=2)


def _write(
    folder: Path, *, fails: bool = False, pays: bool = True, kl: tuple[float, ...] = (0.02,) * STEPS, **figures: Any
) -> None:
    write_tokenizer(folder / "model")
    settings = {"command": "train.grpo", "model_path": str(folder / "model"), "device": "cuda", "steps": STEPS}
    settings |= {"grpo.learning_rate": RATE, "grpo.epochs": 2, "grpo.minibatches": 4, "grpo.groups": GROUPS}
    store_settings(folder / "run.json", settings)
    draw, files = random.Random(0), RunWriter(folder, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    for step in range(STEPS):
        files.note(StepBegan(step=step))
        files.record_trajectories(step, _played(draw, step, fails=fails, pays=pays))
        told = {"reward": 0.5, "trajectories": EPISODES, **figures}
        losses = {"behaviour_kl": kl[step], "entropy": 1.0}
        files.record(step_metrics(step, FIRST, losses=losses, **told))
        files.note(StepEnded(step=step, phases={"rollout": 2.0, "train": 1.0, "sync": 0.25}))
    files.note(RunEnded(exit_status=0))
    files.close()


def _played(draw: random.Random, step: int, *, fails: bool, pays: bool) -> list[Trajectory]:
    found = []
    for group in range(GROUPS):
        for member in range(MEMBERS):
            task, version = Task(seed=group, group=step * GROUPS + group, member=member), f"{step}@{FIRST}"
            if fails and (group + member) % 5 == 0:
                t = fail(draw, task, version=version, began=0.0, error=DISK_FULL)
            else:
                t = play(draw, task, skill=0.9, version=version, began=0.0)
            if not pays:
                t.turns[-1].reward = 0.0
                t.reward = 0.0
            found.append(t)
    return found
