"""Kills trainers while they save, rename, push, write the journal and train, and counts what the kills cost.

    python -m benchmarks.kill_points --trainers grpo async_grpo --random 20 --out runs/kill-points

Each case trains the demo's game on the CPU until the trainer kills itself at a point (`killed_trainer`), or is killed
after a random time, and resumes it until its last step. One line of JSON for each case, and a table at the end:

    lost       seconds between the state of the checkpoint and the kill, whose work is repeated or kept
    repeated   seconds of steps that had ended and ran again, without launching
    finished   groups in the journal that the checkpoint does not count as done
    kept       groups of these that were trained without being played again
    again      groups of these that were played again, because they were too old
    fates      number of groups by fate; each must have one

The exit status is 1 if a group has two fates or none, or if a resumed run does not end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.group_fates import group_fates, step_fates
from benchmarks.killed_trainer import POINTS
from benchmarks.processes import has_ended, process_tree
from verl_server.ipc.sockets import free_port
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.train.demo import make_policy_folder
from verl_server.train.journal import read_groups
from verl_server.watch.run_files import read_events, read_lineage, read_metrics
from verl_server.watch.run_records import StepBegan, StepEnded

_GROUPS = 8
_CALLS = {"save": 2, "before rename": 2, "after rename": 2, "push": 4, "journal": 19, "compaction": 2, "optimizer": 14}
"""Point -> the call in which the trainer dies: in its third or fourth step."""
_ASYNC_CALLS = _CALLS | {"journal": 30}
"""The same of the asynchronous trainer, which has played the groups of three steps before its first one ends."""


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/kill-points")
    """Folder of the runs. Each case has one of its own."""
    trainers: tuple[Literal["grpo", "async_grpo"], ...] = ("grpo", "async_grpo")
    """The trainers to kill."""
    points: tuple[str, ...] = tuple(POINTS)
    """The points at which they die, once each. `none`: no point."""
    random: int = 0
    """Kills of each trainer after random times."""
    ranks: int = 1
    """Trainer ranks."""
    steps: int = 6
    """Steps of each run."""
    save_every: int = 1
    """Steps between two checkpoints."""
    max_staleness: int = 2
    """Option of the asynchronous trainer."""
    latency: float = 0.1
    """Median seconds that the environment takes to answer."""
    seed: int = 0
    """Seed of the random times."""
    patience: float = 300.0
    """Most seconds of one start."""


@dataclass(frozen=True)
class Case:
    args: Args
    trainer: str
    name: str
    url: str
    model: Path

    @property
    def out(self) -> Path:
        return self.args.out / f"{self.trainer}-{self.args.ranks}-{self.name.replace(' ', '-')}"

    def start(self, point: str = "none", *more: str) -> subprocess.Popen[bytes]:
        """Start the trainer in a session of its own."""
        options: dict[str, Any] = {
            "--model-path": self.model,
            "--env-url": self.url,
            "--out": self.out,
            "--steps": self.args.steps,
            "--save-every": self.args.save_every,
            "--device": "cpu",
            "--max-turns": 5,
            "--max-new-tokens": 1,
            "--retry-pause": 1,
            "--stop-on": "none",
            "--grpo.groups": _GROUPS,
            "--grpo.learning-rate": 1e-3,
            "--grpo.epochs": 1,
            "--server.cpu-threads": 1,
            "--server.kv-cache-gib": 0.25,
        }
        if self.trainer == "async_grpo":
            options["--max-staleness"] = self.args.max_staleness
        calls = _ASYNC_CALLS if self.trainer == "async_grpo" else _CALLS
        words = [point, str(calls.get(point, 0)), self.trainer]
        words += [str(word) for option in options.items() for word in option] + ["--no-chat", *more]
        command = [sys.executable, "-m", "benchmarks.killed_trainer", *words]
        if self.args.ranks > 1:
            launch = ["torch.distributed.run", "--master-port", str(free_port()), f"--nproc-per-node={self.args.ranks}"]
            command = [sys.executable, "-m", *launch, "-m", *command[2:]]
        with self.out.with_suffix(".log").open("a") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    model, draw = make_policy_folder(args.out / "policy", 0), random.Random(args.seed)
    cases: list[dict[str, Any]] = []
    game = "verl_server.rollout.environments.games:GuessNumber"
    with EnvServer(game, kwargs={"latency": args.latency}) as environment:
        for trainer in args.trainers:
            names = [point for point in args.points if point != "none"]
            names += [f"random {number}" for number in range(args.random)]
            for name in names:
                case = Case(args, trainer, name, environment.url, model)
                figures = _run(case, None if name in POINTS else draw.random())
                print(json.dumps(figures), flush=True)
                cases.append(figures)
    _print_table(cases)
    sys.exit(0 if all(case["ended"] and not case["lost_groups"] and not case["twice"] for case in cases) else 1)


def _run(case: Case, share: float | None) -> dict[str, Any]:
    """Kill a run and resume it. `share` is the share of its steps after which it is killed from outside."""
    with _started(case, "none" if share is not None else case.name) as process:
        if share is None:
            _wait(process, case.args.patience)
        else:
            _kill_later(process, case, share)
        killed, was_killed = time.time(), process.poll() not in (0, None)
    checkpoint = latest_checkpoint(case.out)
    figures: dict[str, Any] = {"trainer": case.trainer, "ranks": case.args.ranks, "point": case.name}
    figures |= {"killed": was_killed, "checkpoint": None if checkpoint is None else checkpoint.name}
    if checkpoint is None:  # before the first checkpoint, there is nothing to continue from
        return figures | {"ended": True, "lost_groups": [], "twice": [], "fates": {}}
    progress = check_checkpoint(checkpoint)
    started = progress.next_step * _GROUPS if case.trainer == "grpo" else progress.next_group or 0
    done = set(range(started)) - set(progress.undone_groups or [])
    finished = {group.number for group in read_groups(case.out, lambda number: number not in done)}
    ends = [e.time for e in read_events(case.out) if isinstance(e, StepEnded) and e.step == progress.next_step - 1]
    reached = len(list(read_metrics(case.out)))
    with _started(case, "none", "--resume") as process:
        ended = _wait(process, case.args.patience) == 0
    fates = step_fates(case.out, _GROUPS) if case.trainer == "grpo" else group_fates(case.out)
    kept = sum(step["kept_groups"] for step in read_metrics(case.out) if step["step"] >= progress.next_step)
    return figures | {
        "lost": round(killed - max(ends), 2) if ends else None,
        "repeated": round(_seconds_of_steps(case.out, progress.next_step, reached), 2),
        "finished": len(finished),
        "kept": kept,
        "again": len(finished) - kept,
        "fates": fates["fates"],
        "lost_groups": fates["lost"],
        "twice": fates["twice"],
        "ended": ended,
    }


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


@contextlib.contextmanager
def _started(case: Case, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the trainer, and wait afterwards until the processes that it left behind have ended."""
    process = case.start(*options)
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


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _kill_later(process: subprocess.Popen[bytes], case: Case, share: float) -> None:
    """Kill the trainer at a random moment after its first checkpoint. `share` says after how many steps, and when."""
    step = 1 + share * (case.args.steps - 2)
    deadline = time.monotonic() + case.args.patience
    while process.poll() is None and time.monotonic() < deadline:
        checkpoint = latest_checkpoint(case.out) if case.out.exists() else None
        metrics = case.out / "metrics.jsonl"
        count = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if checkpoint is not None and count >= int(step):
            time.sleep(2 * (step - int(step)))
            break
        time.sleep(0.05)
    for pid in process_tree(process.pid)[::-1] if case.args.ranks > 1 else [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(60)


def _print_table(cases: list[dict[str, Any]]) -> None:
    columns = ("trainer", "ranks", "point", "checkpoint", "lost", "repeated", "finished", "kept", "again", "fates")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for case in cases:
        print("| " + " | ".join(str(case.get(name, "-")) for name in columns) + " |")


if __name__ == "__main__":
    main()
