"""Measure the cost of writing the files of a training run, on the demo's game.

    python -m benchmarks.run_files --steps 8

trains with `train.grpo` on the CPU, and prints one JSON line: the share of the steps' time that writing takes (all
trajectories, what the trainer computed for them, metrics), and the bytes of an episode. The goal is a share of 0.01.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from verl_server.files.segments import segment_files
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.demo import make_policy_folder
from verl_server.watch.run_files import rank_paths, read_events, read_metrics
from verl_server.watch.run_records import StepEnded

NUMBERS, GUESSES = 12, 5
GOAL = 0.01


@dataclass(frozen=True)
class Args:
    steps: int = 8
    """Training steps."""
    groups: int = 32
    """Groups of 8 episodes in a step."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    game = {"numbers": NUMBERS, "guesses": GUESSES}
    with (
        tempfile.TemporaryDirectory() as folder,
        EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs=game) as environment,
    ):
        out = Path(folder) / "run"
        command = _command(args, make_policy_folder(Path(folder) / "model", 0), environment.url, out)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(json.dumps({"steps": args.steps, "goal": GOAL} | measure(out)))


def measure(out: Path) -> dict[str, float]:
    """Return the figures of a run."""
    steps = [event.phases for event in read_events(out) if isinstance(event, StepEnded)]
    episodes = sum(line["trajectories"] for line in read_metrics(out))
    written = sum(phases["record"] for phases in steps)
    total = sum(sum(phases.values()) for phases in steps)
    sizes = {
        kind: sum(file.stat().st_size for path in rank_paths(out, kind) for file in segment_files(path))
        for kind in ("trajectories", "trained")
    }
    return {
        "record_share": round(written / total, 5),
        "record_ms_per_episode": round(1000 * written / episodes, 4),
        "step_seconds": round(total / len(steps), 3),
        "trajectory_bytes_per_episode": round(sizes["trajectories"] / episodes),
        "trained_bytes_per_episode": round(sizes["trained"] / episodes),
    }


def _command(args: Args, model: Path, env_url: str, out: Path) -> list[str]:
    options = {
        "--model-path": model,
        "--env-url": env_url,
        "--out": out,
        "--steps": args.steps,
        "--device": "cpu",
        "--max-new-tokens": 1,
        "--max-turns": GUESSES,
        "--save-every": 0,
        "--server.dtype": "float32",
        "--server.cpu-threads": 1,
        "--server.kv-cache-gib": 0.25,
        "--grpo.groups": args.groups,
        "--grpo.group-size": 8,
    }
    given = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "verl_server.train.grpo", *given, "--no-chat"]


if __name__ == "__main__":
    main()
