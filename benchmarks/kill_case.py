"""`KillCase`: one run of the demo's game that is killed, resumed until its last step, and judged by its files.

`kill_points` plays many of them beside each other. A case shares nothing with another one: it has a folder, a rollout
server and an environment server of its own, and the ports are those that the system gives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.group_fates import evaluation_counts, group_fates, step_fates
from benchmarks.processes import has_ended, process_tree
from verl_server.errors import BadRequestError
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.checkpoints import POLICY, check_checkpoint, latest_checkpoint, load_checkpoint
from verl_server.train.evaluations import best_evaluated_step
from verl_server.train.journal import read_groups
from verl_server.train.policy import load_policy
from verl_server.train.ranks import setup_ranks
from verl_server.watch.run_files import read_events, read_lineage, read_metrics
from verl_server.watch.run_records import StepBegan, StepEnded

GROUPS = 8
"""Groups of a step."""
_GAME = "verl_server.rollout.environments.games:GuessNumber"
_LOADING = threading.Lock()


@dataclass(frozen=True)
class CaseSettings:
    """The settings that all cases have in common."""

    out: Path
    """Folder of the runs."""
    model: Path
    """Folder of the initial policy."""
    steps: int
    save_every: int
    eval_every: int
    eval_tasks: int
    max_staleness: int
    latency: float
    patience: float
    """Most seconds of one start."""
    deadline: float
    """Time on the monotonic clock at which every start is killed."""

    @property
    def seconds_left(self) -> float:
        return max(0.0, min(self.patience, self.deadline - time.monotonic()))


@dataclass(frozen=True)
class KillCase:
    settings: CaseSettings
    trainer: str
    ranks: int
    point: str
    """Name of a point of `killed_trainer`, or of a random time."""
    share: float | None = None
    """Share of the run's steps after which it is killed from outside. None: it kills itself at `point`."""

    @property
    def name(self) -> str:
        return f"{self.trainer}-{self.ranks}-{self.point.replace(' ', '-')}"

    @property
    def out(self) -> Path:
        return self.settings.out / self.name

    def play(self) -> dict[str, Any]:
        """Kill the run, resume it, and return the figures (`kill_points` describes them)."""
        begin = time.monotonic()
        with EnvServer(_GAME, kwargs={"latency": self.settings.latency}) as environment:
            figures = {"trainer": self.trainer, "ranks": self.ranks, "point": self.point}
            figures |= self._play(environment.url)
        return figures | {"seconds": round(time.monotonic() - begin, 1)}

    def _play(self, url: str) -> dict[str, Any]:
        mark = self.out.with_suffix(".killed")
        with self._started(url, mark, "none" if self.share is not None else self.point) as process:
            if self.share is None:
                _wait(process, self.settings.seconds_left)
            else:
                self._kill_later(process, mark)
        checkpoint = latest_checkpoint(self.out)
        figures: dict[str, Any] = {
            "killed": mark.exists(),
            "checkpoint": None if checkpoint is None else checkpoint.name,
        }
        if not mark.exists() or checkpoint is None:  # without a checkpoint, there is nothing to continue from
            return figures | {"ended": False}
        progress = check_checkpoint(checkpoint)
        started = progress.first_group(GROUPS)
        done = set(range(started)) - set(progress.undone_groups or [])
        finished = {group.number for group in read_groups(self.out, lambda head: head.number not in done)}
        ends = [e.time for e in read_events(self.out) if isinstance(e, StepEnded) and e.step == progress.next_step - 1]
        reached = len(list(read_metrics(self.out)))
        evaluated = evaluation_counts(self.out)
        with self._started(url, mark, "none", "--resume") as process:
            ended = _wait(process, self.settings.seconds_left) == 0
        fates = step_fates(self.out, GROUPS) if self.trainer == "grpo" else group_fates(self.out)
        kept = sum(step["kept_groups"] for step in read_metrics(self.out) if step["step"] >= progress.next_step)
        return (
            figures
            | {
                "lost": round(mark.stat().st_mtime - max(ends), 2) if ends else None,
                "repeated": round(_seconds_of_steps(self.out, progress.next_step, reached), 2),
                "finished": len(finished),
                "kept": kept,
                "again": len(finished) - kept,
                "fates": fates["fates"],
                "lost_groups": fates["lost"],
                "twice": fates["twice"],
                "ended": ended,
            }
            | self._evaluated(evaluated)
        )

    def _evaluated(self, before: dict[int, int]) -> dict[str, Any]:
        """Return the figures about evaluations. `before` has those of the first start."""
        every, steps = self.settings.eval_every, self.settings.steps
        if not every:
            return {}
        due = sorted({*range(0, steps, every), steps})
        counts = evaluation_counts(self.out)
        wrong = sorted(step for step in {*due, *counts} if counts.get(step, 0) != (step in due))
        best = best_evaluated_step(self.out)
        error = "no evaluation counts" if best is None else self._load_error(self.out / f"checkpoint-{best}")
        return {"evaluated": len(counts), "before": len(before), "wrong": wrong, "best": best, "best_error": error}

    def _load_error(self, checkpoint: Path) -> str | None:
        """Return why a checkpoint cannot be loaded, or None."""
        with _LOADING:
            setup_ranks("cpu")
            policy = load_policy(str(self.settings.model), torch.device("cpu"), compute_dtype=torch.float32)
            try:
                check_checkpoint(checkpoint)
                optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, (0.9, 0.95))
                load_checkpoint(checkpoint, {POLICY: (policy, optimizer)})
            except (BadRequestError, OSError) as error:
                return str(error)
        return None

    @contextlib.contextmanager
    def _started(self, url: str, mark: Path, point: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start the trainer in a session of its own. Afterwards, wait until the processes that it left have ended."""
        process = self._start(url, mark, point, *more)
        tree: set[int] = set()
        try:
            yield process
        finally:
            tree.update(process_tree(process.pid))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
            deadline = time.monotonic() + 60
            while not all(map(has_ended, tree)) and time.monotonic() < deadline:
                time.sleep(0.1)

    def _start(self, url: str, mark: Path, point: str, *more: str) -> subprocess.Popen[bytes]:
        settings = self.settings
        options: dict[str, Any] = {
            "--model-path": settings.model,
            "--env-url": url,
            "--out": self.out,
            "--steps": settings.steps,
            "--save-every": settings.save_every,
            "--eval-every": settings.eval_every,
            "--eval-tasks": settings.eval_tasks,
            "--eval-timeout": 120,
            "--device": "cpu",
            "--max-turns": 5,
            "--max-new-tokens": 1,
            "--retry-pause": 1,
            "--stop-on": "none",
            "--grpo.groups": GROUPS,
            "--grpo.learning-rate": 1e-3,
            "--grpo.epochs": 1,
            "--server.cpu-threads": 1,
            "--server.kv-cache-gib": 0.25,
        }
        if self.trainer == "async_grpo":
            options["--max-staleness"] = settings.max_staleness
        words = [point, str(mark), self.trainer]
        words += [str(word) for option in options.items() for word in option] + ["--no-chat", *more]
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m"]
        command = [sys.executable, "-m", *(launch if self.ranks > 1 else ()), "benchmarks.killed_trainer", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.out.with_suffix(".log").open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)

    def _kill_later(self, process: subprocess.Popen[bytes], mark: Path) -> None:
        """Kill the trainer at a random moment after its second step, with all ranks.

        The moment within a step is a share of the time that the step before it took.
        """
        assert self.share is not None
        step = 2 + self.share * (self.settings.steps - 3)
        deadline = time.monotonic() + self.settings.seconds_left
        metrics = self.out / "metrics.jsonl"
        while process.poll() is None and time.monotonic() < deadline:
            checkpoint = latest_checkpoint(self.out) if self.out.exists() else None
            whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
            ends = [json.loads(line)["time"] for line in whole.splitlines()]
            if checkpoint is not None and len(ends) >= int(step):
                _wait(process, (step - int(step)) * (ends[-1] - ends[-2]))
                break
            time.sleep(0.05)
        if process.poll() is None:
            mark.touch()
        for pid in process_tree(process.pid)[::-1] if self.ranks > 1 else [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)


def _seconds_of_steps(out: Path, first: int, last: int) -> float:
    """Return the seconds of the steps from `first` to before `last` in the start that goes on."""
    lineage = read_lineage(out)
    events = [e for e in read_events(out) if isinstance(e, StepBegan | StepEnded)]
    times = [
        e.time if isinstance(e, StepEnded) else -e.time
        for e in events
        if lineage.has(e.step, e.incarnation) and first <= e.step < last
    ]
    return sum(times)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
