"""Losses on samples of a fixed age: the demo's game, its policy and its trainer, without servers and without waits.

    python -m benchmarks.async_ages --ages 0 1 2 4 8 --losses clip_behaviour tis decoupled unclipped --seeds 0 1 2 \\
        --out ages.jsonl

Each step trains on the episodes that the weights of `age` pushes ago played, each token with its own log-probability of
then, as `async_grpo` would if all groups had the largest age. This process plays the game itself, in batches, so a run
takes a minute, and one that is repeated gives the same numbers. Held-out success is measured every ten steps.

Prints a line of JSON for each run, appends it to --out, and prints a Markdown table of all runs in the file at the end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import AutoTokenizer

from benchmarks.async_waits import GUESSES, NUMBERS, HeldOut, sample
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.renderer import TextRenderer
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.demo import CONFIG, make_policy_folder
from verl_server.train.grpo import PolicyTrainer, group_advantages
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import Policy, load_policy
from verl_server.train.ranks import setup_ranks
from verl_server.train.run_tasks import make_tasks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Args:
    ages: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Ages of the samples, in pushes."""
    losses: tuple[str, ...] = ("clip_behaviour", "tis", "decoupled", "unclipped")
    """Losses; with `:` and an option of the loss behind it, such as `decoupled:token_mask=0.5,5`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights, games and draws."""
    steps: int = 100
    """Training steps of a run."""
    learning_rate: float = CONFIG.learning_rate
    """Learning rate; the demo's by default."""
    held_out: int = 512
    """Held-out episodes of an evaluation."""
    out: Path = Path("runs/ages.jsonl")
    """File to which a line is appended for each run."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    setup_ranks("cpu")
    torch.set_num_threads(1)
    for age in args.ages:
        for loss in args.losses:
            for seed in args.seeds:
                line = json.dumps(run(args, age, loss, seed))
                with args.out.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


def run(args: Args, age: int, loss: str, seed: int) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    start = time.monotonic()
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_policy_folder(Path(temporary) / "model", seed)
        policy, old = (load_policy(str(folder), CPU, compute_dtype=torch.float32) for _ in range(2))
        game = Game(folder)
        held_out = HeldOut(folder, args.held_out, seed)
    config = configured(loss, replace(CONFIG, seed=seed, learning_rate=args.learning_rate))
    trainer = PolicyTrainer(policy, config, args.steps, CPU)
    versions: deque[list[torch.Tensor]] = deque(maxlen=age + 1)
    curve, losses = [], list[dict[str, float]]()
    for step in range(args.steps):
        versions.append([parameter.detach().clone() for parameter in policy.parameters()])
        with torch.no_grad():
            for parameter, kept in zip(old.parameters(), versions[0], strict=True):
                parameter.copy_(kept)
        draws = torch.Generator().manual_seed(seed * 1_000_003 + step)
        trajectories = asyncio.run(game.play(old, make_tasks(step, config, 0, config.groups), draws))
        samples = group_advantages(trajectories, config.normalize_std)
        if samples:
            losses.append(trainer.update(samples, step).losses)
        if step % 10 == 9:
            curve.append(round(held_out.success(policy, step), 4))
    return {
        "age": age,
        "loss": loss,
        "seed": seed,
        "steps": args.steps,
        "learning_rate": args.learning_rate,
        "success": curve,
        "best": max(curve),
        "losses": {name: round(statistics.mean(each[name] for each in losses), 4) for name in losses[-1]},
        "largest_kl": round(max(each["behaviour_kl"] for each in losses), 3),
        "seconds": round(time.monotonic() - start, 1),
    }


def configured(loss: str, config: GRPOConfig) -> GRPOConfig:
    """Return `config` with a loss and its options: "decoupled:token_mask=0.5,5"."""
    name, _, options = loss.partition(":")
    values: dict[str, Any] = {"loss": name}
    for option in filter(None, options.split(";")):
        key, _, value = option.partition("=")
        numbers = tuple(float(number) for number in value.split(","))
        values[key] = numbers if len(numbers) > 1 else numbers[0]
    return replace(config, **values)


class Game:
    """Plays training episodes with a policy, in batches."""

    def __init__(self, folder: Path) -> None:
        self._renderer = TextRenderer(AutoTokenizer.from_pretrained(folder))

    async def play(self, policy: Policy, tasks: Sequence[Task], draws: torch.Generator) -> list[Trajectory]:
        """Return the trajectory of each task, with the log-probability of each sampled token."""
        games = [GuessNumber(NUMBERS, GUESSES) for _ in tasks]
        trajectories = [Trajectory(task=task, member=task.member) for task in tasks]
        for game, trajectory in zip(games, trajectories, strict=True):
            self._observe(trajectory, await game.reset(trajectory.task.seed))
        playing = list(range(len(tasks)))
        while playing:
            sampled = sample(policy, [trajectories[i].tokens for i in playing], draws)
            still = []
            for i, (token, logprob) in zip(playing, sampled, strict=True):
                trajectory = trajectories[i]
                action = self._renderer.action([token], trajectory.tokens)
                trajectory.append_output([token], [logprob], ["0"])
                observation, reward, done = await games[i].step(action)
                trajectory.turns[-1].reward = reward
                if done:
                    trajectory.finish(StopReason.DONE)
                else:
                    self._observe(trajectory, observation)
                    still.append(i)
            playing = still
        return trajectories

    def _observe(self, trajectory: Trajectory, observation: dict[str, Any]) -> None:
        last = trajectory.tokens[-1] if trajectory.tokens else None
        trajectory.append_observation(observation, self._renderer.observation_tokens(observation, last))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: a row for each loss, a column for each age; success at the end and at its best."""
    ages = sorted({line["age"] for line in lines})
    rows = ["| loss | " + " | ".join(f"age {age}" for age in ages) + " |", "|---" * (len(ages) + 1) + "|"]
    for loss in dict.fromkeys(line["loss"] for line in lines):
        cells = []
        for age in ages:
            runs = [line for line in lines if (line["loss"], line["age"]) == (loss, age)]
            last = ", ".join(f"{line['success'][-1]:.2f}" for line in runs)
            cells.append(f"{last} (KL {max(line['largest_kl'] for line in runs):.2g})" if runs else "-")
        rows.append(f"| `{loss}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
