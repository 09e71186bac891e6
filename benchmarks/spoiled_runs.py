"""Trains the demo's game in runs that are spoiled on purpose, and prints the advisories that each of them raises.

    python -m benchmarks.spoiled_runs --out runs/spoiled

healthy    nothing is wrong, for comparison
failing    one of five episodes fails at its first step: the environment raises an error
zero       the reward is always 0
rate       the learning rate is a hundred times that of the demo

Each run is `verl_server.train.grpo` on the CPU, in a process of its own. Its folder stays, for `verl-server watch`.
Prints one JSON line a run: exit status, steps, and advisories.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.environments.games import GuessNumber
from verl_server.train.demo import CONFIG, make_policy_folder
from verl_server.watch.advisories import advisories_of
from verl_server.watch.run_files import read_events, read_metrics
from verl_server.watch.run_records import RunEnded

SPOILED: dict[str, tuple[dict[str, Any], float]] = {
    "healthy": ({}, 1.0),
    "failing": ({"failing": 0.2}, 1.0),
    "zero": ({"pays": False}, 1.0),
    "rate": ({}, 100.0),
}
"""Run -> (arguments of the game, factor of the learning rate)."""


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/spoiled")
    """Folder of the runs, each of which has a new folder in it."""
    runs: tuple[str, ...] = tuple(SPOILED)
    """Names of the runs."""
    steps: int = 12
    """Steps of each run."""
    groups: int = 16
    """Groups of each step, of 8 episodes each."""
    seed: int = 0
    """Seed of the game and of the weights."""


class SpoiledGame(GuessNumber):
    """The demo's game, whose episodes fail at random, or whose reward is always 0."""

    def __init__(self, failing: float = 0.0, pays: bool = True, **game: Any) -> None:
        """`failing`: share of the episodes that raise an error at their first step. `pays`: False for rewards of 0."""
        super().__init__(**game)
        self._failing, self._pays, self._fails = failing, pays, False

    async def reset(self, seed: int | None = None, episode_id: str | None = None) -> dict[str, Any]:
        self._fails = random.random() < self._failing
        return await super().reset(seed, episode_id)

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        if self._fails:
            raise RuntimeError("the sandbox is out of disk space")
        observation, reward, done = await super().step(action)
        return observation, reward if self._pays else 0.0, done


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    model = make_policy_folder(args.out / "model", args.seed)
    for name in args.runs:
        game, factor = SPOILED[name]
        folder = args.out / name
        with EnvServer("benchmarks.spoiled_runs:SpoiledGame", kwargs=game) as environment:
            status = _train(args, model, environment.url, folder, factor)
        print(json.dumps({"run": name, "exit_status": status} | _described(folder)), flush=True)


def _train(args: Args, model: Path, url: str, out: Path, factor: float) -> int:
    """Run the trainer with the settings of the demo, and return its exit status."""
    options = {
        "model-path": model, "env-url": url, "out": out, "steps": args.steps, "device": "cpu", "max-turns": 5,
        "max-new-tokens": 1, "retry-pause": 0, "save-every": 0, "server.cpu-threads": 1, "server.kv-cache-gib": 0.25,
        "grpo.groups": args.groups, "grpo.group-size": CONFIG.group_size, "grpo.seed": args.seed,
        "grpo.learning-rate": factor * CONFIG.learning_rate, "grpo.entropy-coef": CONFIG.entropy_coef,
        "grpo.max-grad-norm": CONFIG.max_grad_norm,
    }  # fmt: skip
    command = [sys.executable, "-m", "verl_server.train.grpo", "--no-chat"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode


def _described(folder: Path) -> dict[str, Any]:
    ends = [event.error for event in read_events(folder) if isinstance(event, RunEnded)]
    rewards = [line["reward"] for line in read_metrics(folder)]
    found = [{"severity": advisory.severity, "text": advisory.describe()} for advisory in advisories_of(folder)]
    return {"error": ends[-1] if ends else None, "steps": len(rewards), "rewards": rewards, "advisories": found}


if __name__ == "__main__":
    main()
