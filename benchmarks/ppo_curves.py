"""PPO beside GRPO on the demo's game: learning curves of several seeds, with equal episodes and equal schedules.

    python -m benchmarks.ppo_curves --seeds 0 1 2 --out runs/ppo-curves
    python -m benchmarks.ppo_curves --trainers ppo --out runs/lambda -- --ppo.gae-lambda 1

Each run trains the demo's policy of random weights on the CPU with 256 episodes a step: PPO plays 256 seeds once, GRPO
32 groups of 8. Learning rate, entropy bonus and bound of gradients are the demo's and fall over --steps, for both.
Options after `--` are those of the runs of PPO. Every 20 steps a run plays held-out games.

Prints a line of JSON for each run as it ends and appends it to OUT/runs.jsonl, then prints a Markdown table of all runs
in the file, and draws the rewards of training in OUT/curves.svg. Runs in OUT that are complete are not repeated.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.curves import COLOURS, MEAN_OF, as_file, draw_curves
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.demo import CONFIG, make_policy_folder
from verl_server.watch.run_files import read_evaluations, read_metrics

Runs = Mapping[str, list[dict[str, Any]]]
"""Trainer -> the figures of its runs."""
_EPISODES = 256
"""Episodes of a step."""


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/ppo-curves")
    """Folder of the runs, runs.jsonl and curves.svg."""
    trainers: tuple[Literal["grpo", "ppo"], ...] = ("grpo", "ppo")
    """Trainers to compare."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights, games and draws."""
    steps: int = 120
    """Training steps of a run."""
    jobs: int = 1
    """Runs at one time. Each keeps about two cores busy."""
    held_out: int = 512
    """Held-out games of an evaluation."""
    patience: float = 3600.0
    """Most seconds of a run."""
    options: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of the runs of PPO, after `--`."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    with EnvServer("verl_server.rollout.environments.games:GuessNumber", max_concurrent_envs=8192) as environment:
        models = {seed: make_policy_folder(args.out / f"policy-{seed}", seed) for seed in args.seeds}

        def work(case: tuple[str, int]) -> None:
            _train(args, *case, environment.url, models[case[1]])

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(work, [(trainer, seed) for seed in args.seeds for trainer in args.trainers]))
    runs: Runs = {trainer: [_figures(args.out, trainer, seed) for seed in args.seeds] for trainer in args.trainers}
    print(_table(runs))
    _draw(args, runs)


def _train(args: Args, trainer: str, seed: int, url: str, model: Path) -> None:
    out = args.out / f"{trainer}-{seed}"
    if (out / "model").exists():
        return
    start = time.monotonic()
    prefix = "grpo" if trainer == "grpo" else "ppo"
    options: dict[str, Any] = {
        "--model-path": model,
        "--env-url": url,
        "--out": out,
        "--steps": args.steps,
        "--save-every": 0,
        "--eval-every": 20,
        "--eval-tasks": args.held_out,
        "--eval-success": 0.6,  # the reward of a game that the last guess wins
        "--device": "cpu",
        "--max-turns": 5,
        "--max-new-tokens": 1,
        f"--{prefix}.seed": seed,
        f"--{prefix}.learning-rate": CONFIG.learning_rate,
        f"--{prefix}.entropy-coef": CONFIG.entropy_coef,
        f"--{prefix}.max-grad-norm": CONFIG.max_grad_norm,
        "--server.cpu-threads": 1,
        "--server.kv-cache-gib": 0.25,
    }
    if trainer == "grpo":
        options |= {"--grpo.groups": CONFIG.groups, "--grpo.group-size": _EPISODES // CONFIG.groups}
    else:
        options |= {"--ppo.groups": _EPISODES, "--ppo.critic-learning-rate": CONFIG.learning_rate}
    words = [str(word) for option in options.items() for word in option] + ["--no-chat"]
    more = args.options if trainer == "ppo" else ()
    command = [sys.executable, "-m", f"verl_server.train.{trainer}", *words, *more]
    with (args.out / f"{trainer}-{seed}.log").open("a") as log:
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, stdout=log, stderr=log, env=one_thread, timeout=args.patience, check=False)
    line = json.dumps(_figures(args.out, trainer, seed) | {"seconds": round(time.monotonic() - start, 1)})
    with (args.out / "runs.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def _figures(folder: Path, trainer: str, seed: int) -> dict[str, Any]:
    out = folder / f"{trainer}-{seed}"
    rewards = [step["reward"] for step in read_metrics(out)]
    return {
        "trainer": trainer,
        "seed": seed,
        "rewards": [round(reward, 4) for reward in rewards if reward is not None],
        "held_out": {line.step: round(line.reward, 4) for line in read_evaluations(out) if line.reward is not None},
    }


def _table(runs: Runs) -> str:
    """Return the held-out rewards of each run by step, and the mean over the seeds."""
    steps = sorted({step for of_trainer in runs.values() for run in of_trainer for step in run["held_out"]})
    lines = ["| held out, after steps | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
    for trainer, of_trainer in runs.items():
        for run in of_trainer:
            values = [f"{run['held_out'][step]:.3f}" if step in run["held_out"] else "" for step in steps]
            lines.append(f"| {trainer}, seed {run['seed']} | " + " | ".join(values) + " |")
        means = [[run["held_out"][step] for run in of_trainer if step in run["held_out"]] for step in steps]
        lines.append(
            f"| {trainer}, mean | " + " | ".join(f"{statistics.mean(m):.3f}" if m else "" for m in means) + " |"
        )
    return "\n".join(lines)


def _draw(args: Args, runs: Runs) -> None:
    colours = dict(zip(runs, COLOURS, strict=False))
    curves = [(colours[trainer], run["rewards"]) for trainer, of_trainer in runs.items() for run in of_trainer]
    label = f"Share of games won by training step, mean over {MEAN_OF} steps, one line a seed"
    drawing = draw_curves(curves, args.steps, 1.0, label)
    names = [({"grpo": "GRPO", "ppo": "PPO"}[trainer], colour) for trainer, colour in colours.items()]
    (args.out / "curves.svg").write_text(as_file(drawing, names))


if __name__ == "__main__":
    main()
