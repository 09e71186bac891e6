"""Measures what evaluations cost on the demo's game, and what the best checkpoint of a run is worth that became worse.

    python -m benchmarks.evaluations --out runs/evaluations

Each trainer trains the demo's game on the CPU with a learning rate that spoils the policy sooner or later, so that the
best evaluated weights are older than the newest checkpoints. A second run begins with `--fork RUN --fork-step best` and
`--steps` of that step: it evaluates these weights again, and trains nothing. One line of JSON for each trainer, also in
OUT/results.jsonl:

    rewards       step -> mean reward of its evaluation
    checkpoints   steps of the checkpoints that the run has kept
    best          step of the best evaluation, and `reward` its mean reward
    again         mean reward of the same weights in the fork
    same          held-out episodes, of all, that have the same tokens in the fork
    eval_seconds  median seconds of an evaluation, `push_delay` for which it held a push, `step_seconds` of a step
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.checkpoints import checkpoints_of, step_of
from verl_server.train.demo import make_policy_folder
from verl_server.train.evaluations import best_evaluated_step
from verl_server.watch.run_files import read_evaluations, read_events
from verl_server.watch.run_records import StepEnded


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/evaluations")
    """Folder of results.jsonl and of the runs. It must be new."""
    trainers: tuple[Literal["grpo", "async_grpo"], ...] = ("grpo", "async_grpo")
    """The trainers."""
    steps: int = 24
    """Steps of each run."""
    eval_every: int = 3
    """Steps between two evaluations."""
    eval_tasks: int = 64
    """Held-out tasks."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay beside the best one."""
    groups: int = 16
    """Groups of 8 episodes in a step."""
    learning_rate: float = 3e-2
    """The demo trains with 4e-3."""
    latency: float = 0.05
    """Median seconds that the environment takes to answer."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    model = make_policy_folder(args.out / "policy", 0)
    with EnvServer(
        "verl_server.rollout.environments.games:GuessNumber", kwargs={"latency": args.latency}
    ) as environment:
        for trainer in args.trainers:
            figures = json.dumps(_figures(args, trainer, model, environment.url))
            print(figures, flush=True)
            with (args.out / "results.jsonl").open("a") as file:
                file.write(figures + "\n")


def _figures(args: Args, trainer: str, model: Path, url: str) -> dict[str, Any]:
    out, forked = args.out / trainer, args.out / f"{trainer}-best"
    _train(args, trainer, model, url, out, args.steps)
    evaluations = list(read_evaluations(out))
    best = best_evaluated_step(out)
    assert best is not None, "no evaluation is complete"
    _train(args, trainer, model, url, forked, max(1, best), "--fork", str(out), "--fork-step", "best")
    again = next(iter(read_evaluations(forked)))
    # No push follows the last evaluation of an asynchronous run.
    held = evaluations if trainer == "grpo" else evaluations[:-1]
    steps = [sum(event.phases.values()) for event in read_events(out) if isinstance(event, StepEnded)]
    before, after = _episodes(out, best), _episodes(forked, best)
    return {
        "trainer": trainer,
        "rewards": {e.step: e.reward for e in evaluations},
        "checkpoints": sorted(map(step_of, checkpoints_of(out))),
        "best": best,
        "reward": next(e.reward for e in evaluations if e.step == best),
        "again": again.reward,
        "same": sum(before[name] == after.get(name) for name in before),
        "episodes": again.episodes,
        "eval_seconds": round(statistics.median(e.seconds for e in evaluations), 2),
        "push_delay": round(statistics.median(e.push_delay for e in held), 2),
        "step_seconds": round(statistics.median(steps), 2),
    }


def _episodes(out: Path, step: int) -> dict[str, list[int]]:
    """Return name -> tokens of the held-out episodes of an evaluation."""
    lines = map(json.loads, (out / "held-out-rank0.jsonl").read_text().splitlines())
    return {line["task"]["episode_id"]: line["tokens"] for line in lines if line["step"] == step}


def _train(args: Args, trainer: str, model: Path, url: str, out: Path, steps: int, *more: str) -> None:
    options: dict[str, Any] = {
        "--model-path": model,
        "--env-url": url,
        "--out": out,
        "--steps": steps,
        "--save-every": 1,
        "--keep-checkpoints": args.keep_checkpoints,
        "--eval-every": args.eval_every,
        "--eval-tasks": args.eval_tasks,
        "--device": "cpu",
        "--max-turns": 5,
        "--max-new-tokens": 1,
        "--retry-pause": 0,
        "--max-skipped-steps": 100,
        "--stop-on": "none",
        "--grpo.groups": args.groups,
        "--grpo.group-size": 8,
        "--grpo.learning-rate": args.learning_rate,
        "--server.cpu-threads": 1,
        "--server.kv-cache-gib": 0.25,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", f"verl_server.train.{trainer}", *words, "--no-chat", *more]
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
