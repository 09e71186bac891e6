"""Kills rollout server, environment server and rollout process at random moments of an asynchronous run.

    python -m benchmarks.async_kills --kills 20 --out runs/kills

Trains the demo's game with `verl_server.train.async_grpo` on the CPU, and sends SIGKILL to one of the three processes
again and again, at moments drawn from --seed. The trainer launches its server and the rollout process again; this
program starts the environment server again, at the same port, after a moment. Training goes on until the kills are done
and five more steps have ended; then SIGTERM ends and saves the run.

Prints one JSON line: the kills, the longest time between two steps, and the fate of each group, read from the files of
the run. The exit status is 1 if a group has two fates or none, or if the run did not go on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.group_fates import group_fates
from benchmarks.processes import process_tree
from verl_server.train.demo import make_policy_folder

_VICTIMS = {
    "server": "verl_server.server.launch",
    "environment": "env serve",
    "rollouts": "verl_server.train.rollouts.group_player",
}


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/kills")
    """Folder of the run."""
    kills: int = 20
    """Number of kills."""
    gap: float = 8.0
    """Mean seconds between two kills."""
    seed: int = 0
    """Seed of moments and victims."""
    max_staleness: int = 2
    """Option of the trainer."""
    patience: float = 120.0
    """Most seconds between two steps."""
    latency: float = 0.1
    """Median seconds that the environment takes to answer."""
    port: int = 8331
    """Port of the environment server."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(args.seed)
    environment = _environment(args)
    trainer = _trainer(args)
    kills: list[dict[str, Any]] = []
    try:
        _wait(lambda: len(_steps(args)) >= 2, trainer, 180.0)
        for _ in range(args.kills):
            time.sleep(draw.expovariate(1 / args.gap))
            victim = draw.choice(list(_VICTIMS))
            pids = _pids(trainer.pid, environment.pid, _VICTIMS[victim])
            if trainer.poll() is not None:
                break
            for pid in pids[:1]:
                os.kill(pid, signal.SIGKILL)
            kills.append({"victim": victim, "killed": bool(pids), "after_step": len(_steps(args))})
            if victim == "environment":
                environment.wait(10)
                time.sleep(draw.uniform(0.0, 2.0))
                environment = _environment(args)
        reached = len(_steps(args))
        goes_on = _wait(lambda: len(_steps(args)) >= reached + 5, trainer, args.patience)
    finally:
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(120)
        environment.kill()
    figures = _figures(args) | {"goes_on": goes_on, "exit_status": status, "kills": kills}
    print(json.dumps(figures), flush=True)
    sys.exit(0 if goes_on and not figures["lost"] and not figures["twice"] else 1)


def _environment(args: Args) -> subprocess.Popen[bytes]:
    kwargs = json.dumps({"latency": args.latency})
    game = "verl_server.rollout.environments.games:GuessNumber"
    command = [sys.executable, "-m", "verl_server", "env", "serve", game, "--kwargs", kwargs]
    with (args.out / "environment.log").open("a") as log:
        return subprocess.Popen([*command, "--port", str(args.port)], stdout=log, stderr=log)


def _trainer(args: Args) -> subprocess.Popen[bytes]:
    model = make_policy_folder(args.out / "policy", 0)
    options = {
        "--model-path": model,
        "--env-url": f"http://127.0.0.1:{args.port}",
        "--out": args.out / "run",
        "--steps": 100_000,
        "--device": "cpu",
        "--max-staleness": args.max_staleness,
        "--max-turns": 5,
        "--max-new-tokens": 1,
        "--retry-pause": 1,
        "--max-skipped-steps": 20,
        "--grpo.groups": 8,
        "--grpo.learning-rate": 1e-3,
        "--server.cpu-threads": 1,
        "--server.kv-cache-gib": 0.25,
    }
    words = [str(word) for option in options.items() for word in option]
    with (args.out / "trainer.log").open("w") as log:
        command = [sys.executable, "-m", "verl_server.train.async_grpo", *words, "--no-chat"]
        return subprocess.Popen(command, stdout=log, stderr=log)


def _pids(trainer: int, environment: int, name: str) -> list[int]:
    """Return the processes of the run whose command line has `name`, parents first."""
    found = []
    for pid in (*process_tree(trainer), *process_tree(environment)):
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(pid)
    return found


def _wait(is_done: Any, trainer: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return True if `is_done()` became true while steps went on, each within `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_done():
        if trainer.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _steps(args: Args) -> list[dict[str, Any]]:
    file = args.out / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _figures(args: Args) -> dict[str, Any]:
    steps = _steps(args)
    pauses = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    return {
        "steps": len(steps),
        "skipped": sum(step["skipped"] is not None for step in steps),
        "longest_between_steps": round(max(pauses, default=0.0), 1),
        "median_between_steps": round(statistics.median(pauses or [0.0]), 2),
        "age_max": max((step["age_max"] or 0 for step in steps), default=0),
        "failed_episodes": sum(step["failed"] for step in steps),
        "replaced_episodes": sum(step["replaced"] for step in steps),
    } | group_fates(args.out / "run")


if __name__ == "__main__":
    main()
