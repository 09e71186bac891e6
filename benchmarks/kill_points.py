"""Kills trainers while they save, push, write the journal, train and evaluate, and counts what the kills cost.

    python -m benchmarks.kill_points --trainers grpo async_grpo --ranks 1 2 --random 20 --jobs 8 --out runs/kill-points

Each case trains the demo's game on the CPU until the trainer kills itself at a point (`killed_trainer`), or is killed
after a random time, and resumes it until its last step. `--jobs` cases play beside each other. A case that has ended is
a line of OUT/results.jsonl and of the output, and a table follows at the end. A command that was cut off goes on where
it stopped: a case that OUT/results.jsonl has is not played again.

    killed      True if the trainer reached the point
    lost        seconds between the state of the checkpoint and the kill, whose work is repeated or kept
    repeated    seconds of steps that had ended and ran again, without launching
    finished    groups in the journal that the checkpoint does not count as done
    kept        groups of these that were trained without being played again
    again       groups of these that were played again, because they were too old
    fates       number of groups by fate; each must have one
    lost_groups, twice      groups without a fate, and with two
    evaluated   evaluations that are complete, of weights that the run still has; `before`: those before the kill
    wrong       steps whose weights were not evaluated exactly once as complete
    best        step of the best evaluation; `best_error` says why its checkpoint cannot be loaded
    ended       True if the resumed run came to its last step
    seconds     of the case

The exit status is 1 if a case is not as it must be: `problems` says why.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from transformers.utils import logging as transformers_logging

from benchmarks.kill_case import CaseSettings, KillCase
from benchmarks.killed_trainer import POINTS
from benchmarks.processes import process_tree
from verl_server.train.demo import make_policy_folder

_COLUMNS = (
    *("trainer", "ranks", "point", "checkpoint", "lost", "repeated", "finished", "kept", "again", "fates"),
    *("evaluated", "best", "seconds", "problems"),
)


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/kill-points")
    """Folder of results.jsonl and of the runs. Each case has a folder of its own."""
    trainers: tuple[Literal["grpo", "async_grpo"], ...] = ("grpo", "async_grpo")
    """The trainers to kill."""
    points: tuple[str, ...] = tuple(POINTS)
    """The points at which they die, once each. `none`: no point."""
    random: int = 0
    """Kills of each trainer after random times."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of trainer ranks. Each case is played with each of them."""
    jobs: int = 1
    """Cases beside each other. One needs about three cores, and one more for each further rank."""
    seconds: float = 3600.0
    """Most seconds of the command. Starts that run then are killed, and cases that have not ended have no result."""
    steps: int = 6
    """Steps of each run."""
    save_every: int = 1
    """Steps between two checkpoints."""
    eval_every: int = 2
    """Steps between two evaluations. 0: none, and no points inside of them."""
    eval_tasks: int = 16
    """Held-out tasks."""
    max_staleness: int = 2
    """Option of the asynchronous trainer."""
    latency: float = 0.1
    """Median seconds that the environment takes to answer."""
    seed: int = 0
    """Seed of the random times."""
    patience: float = 300.0
    """Most seconds of one start."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, _end_all)
    signal.signal(signal.SIGINT, _end_all)
    settings = CaseSettings(
        out=args.out,
        model=make_policy_folder(args.out / "policy", 0),
        steps=args.steps,
        save_every=args.save_every,
        eval_every=args.eval_every,
        eval_tasks=args.eval_tasks,
        max_staleness=args.max_staleness,
        latency=args.latency,
        patience=args.patience,
        deadline=time.monotonic() + args.seconds,
    )
    cases, results = _cases(args, settings), _results(args.out)
    _play(args, [case for case in cases if case.name not in results], results)
    _print_table([results[case.name] for case in cases if case.name in results])
    missing = [case.name for case in cases if case.name not in results]
    if missing:
        print(f"{len(missing)} cases have no result: {', '.join(missing)}", flush=True)
    sys.exit(1 if missing or any(results[case.name]["problems"] for case in cases) else 0)


def _cases(args: Args, settings: CaseSettings) -> list[KillCase]:
    cases = []
    for trainer in args.trainers:
        draw = random.Random(f"{args.seed}/{trainer}")
        shares = [draw.random() for _ in range(args.random)]
        for ranks in args.ranks:
            for point in (point for point in args.points if point != "none"):
                is_there = trainer in POINTS[point].trainers and (args.eval_every or not POINTS[point].evaluates)
                cases += [KillCase(settings, trainer, ranks, point)] if is_there else []
            cases += [KillCase(settings, trainer, ranks, f"random {i}", share) for i, share in enumerate(shares)]
    return cases


def _results(out: Path) -> dict[str, dict[str, Any]]:
    """Return name of the case -> figures of the cases that results.jsonl has."""
    file = out / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {figures["case"]: figures for figures in found}


def _play(args: Args, cases: list[KillCase], results: dict[str, dict[str, Any]]) -> None:
    """Play cases, and add their figures to `results` and to results.jsonl as they end."""
    begin, lock = time.monotonic(), threading.Lock()

    def play(case: KillCase) -> dict[str, Any] | None:
        """Return the figures of a case, or None if there was no time for it."""
        if case.settings.seconds_left == 0:
            return None
        for left in args.out.glob(f"{case.name}*"):  # of a command that was cut off
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            figures = {"case": case.name} | case.play()
            figures["problems"] = problems(figures)
        except Exception as error:  # the other cases go on
            figures = {"case": case.name, "problems": [f"{type(error).__name__}: {error}"]}
        if case.settings.deadline <= time.monotonic():
            return None
        with lock, (args.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")
        return figures

    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(play, case): case for case in cases}
        for count, future in enumerate(as_completed(futures), 1):
            place, name = f"[{count}/{len(cases)}, {time.monotonic() - begin:.0f} s]", futures[future].name
            if (figures := future.result()) is None:
                print(f"{place} {name} was cut off", flush=True)
                continue
            results[name] = figures
            print(f"{place} {json.dumps(figures)}", flush=True)


def problems(figures: dict[str, Any]) -> list[str]:
    """Return what is not as it must be in the figures of a case."""
    found = [] if figures["killed"] else ["the trainer did not reach the point"]
    found += [] if figures["ended"] or found else ["the resumed run did not end"]
    for name in ("lost_groups", "twice", "wrong", "best_error"):
        found += [f"{name}: {figures[name]}"] if figures.get(name) else []
    return found


def _end_all(number: int, _: object) -> None:
    """Kill the processes of all cases, which have sessions of their own, and end."""
    for pid in process_tree(os.getpid())[:0:-1]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(128 + number)


def _print_table(cases: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|")
    for case in cases:
        print("| " + " | ".join(str(case.get(name, "-")) for name in _COLUMNS) + " |", flush=True)


if __name__ == "__main__":
    main()
