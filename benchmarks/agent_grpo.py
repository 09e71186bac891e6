"""Learning curves of GRPO on the demo's game: a black-box agent (openai SDK) beside the built-in loop.

    python -m benchmarks.agent_grpo --seeds 3 --steps 60 --out runs/agent_grpo

Both train the demo's policy with the demo's settings, see the same text through one chat template, and play the same
seeds. Each run is `verl_server.train.grpo` in a process of its own. Writes the runs to OUT/PLAYER-SEED, one JSON line
for each run and step to OUT/curves.jsonl, the curves to OUT/curves.html, and prints the mean rewards over the seeds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from transformers import AutoTokenizer

from benchmarks.curves import MEAN_OF, draw_curves
from verl_server.rollout.agents.types import AgentSession, AgentTask
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.demo import make_policy_folder
from verl_server.watch import charts
from verl_server.watch.page import legend, page, section

PLAYERS = ("loop", "agent")
COLOURS = {"loop": charts.BLUE, "agent": charts.AMBER}
Curves = dict[tuple[str, int], list[dict[str, Any]]]
"""(player, seed) -> the lines of metrics.jsonl."""
NUMBERS, GUESSES = 12, 5
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<bos> {% endif %}{{ message['content'] }} "
    "{% endfor %}"
)


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/agent_grpo")
    """Folder for curves.jsonl and the runs. A run that is complete there is not repeated."""
    seeds: int = 3
    """Runs of each player."""
    steps: int = 60
    """Training steps of a run."""
    groups: int = 32
    """Groups of 8 episodes in a step."""


async def guess(session: AgentSession, task: AgentTask) -> None:
    """Play one game with the openai SDK."""
    environment = session.environment
    assert environment is not None
    messages: list[Any] = []
    async with session.openai() as client:
        while not environment.done:
            messages.append({"role": "user", "content": environment.observation})
            reply = await client.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            await environment.step(text)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    game = {"numbers": NUMBERS, "guesses": GUESSES}
    with EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs=game) as environment:
        curves = {
            (player, seed): _run(args, player, seed, environment.url)
            for seed in range(args.seeds)
            for player in PLAYERS
        }
    with (args.out / "curves.jsonl").open("w") as file:
        for (player, seed), steps in curves.items():
            for step in steps:
                file.write(json.dumps({"player": player, "seed": seed} | step) + "\n")
    (args.out / "curves.html").write_text(_page(args, curves))
    _report(args, curves)


def _run(args: Args, player: str, seed: int, env_url: str) -> list[dict[str, Any]]:
    """Train once, and return the lines of metrics.jsonl."""
    out = args.out / f"{player}-{seed}"
    metrics = out / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) < args.steps:
        print(f"{player}, seed {seed}: {args.steps} steps into {out}", file=sys.stderr, flush=True)
        subprocess.run(_command(args, player, seed, env_url, out), check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in metrics.read_text().splitlines()][: args.steps]


def _command(args: Args, player: str, seed: int, env_url: str, out: Path) -> list[str]:
    folder = make_policy_folder(args.out / f"model-{seed}", seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    options = {
        "--model-path": folder,
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
        "--grpo.learning-rate": 4e-3,
        "--grpo.entropy-coef": 0.015,
        "--grpo.max-grad-norm": 0.3,
        "--grpo.seed": seed,
    }
    if player == "agent":
        options["--agent"] = f"{__file__}:guess"
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "verl_server.train.grpo", *words]


def _report(args: Args, curves: Curves) -> None:
    print(f"{'steps':>9}" + "".join(f"{player:>8} (each seed)      " for player in PLAYERS))
    for first in range(0, args.steps, 10):
        last = min(first + 10, args.steps)
        line = f"{first:4}-{last - 1:4}"
        for player in PLAYERS:
            means = [_reward(curves[player, seed][first:last]) for seed in range(args.seeds)]
            line += f"{statistics.mean(means):8.3f} ({', '.join(f'{mean:.3f}' for mean in means)})"
        print(line)
    for player in PLAYERS:
        seconds = [step["rollout_seconds"] for seed in range(args.seeds) for step in curves[player, seed]]
        gap = max(step["logprob_gap"] or 0.0 for seed in range(args.seeds) for step in curves[player, seed])
        print(f"{player}: {statistics.median(seconds):.2f} s of rollout a step, largest log-probability gap {gap:.1e}")


def _page(args: Args, curves: Curves) -> str:
    """Draw the reward of each run."""
    rewards = [
        (COLOURS[player], [step["reward"] for step in steps if step["reward"] is not None])
        for (player, _), steps in curves.items()
    ]
    drawing = draw_curves(rewards, args.steps, 1.0, "mean reward by training step")
    names = legend([("built-in loop", charts.BLUE), ("agent with the openai SDK", charts.AMBER)])
    note = f"One line a seed, mean over {MEAN_OF} steps of {args.groups * 8} games each."
    return page("GRPO by the built-in loop and by an agent", section("Reward by training step", drawing + names, note))


def _reward(steps: list[dict[str, Any]]) -> float:
    return float(statistics.mean(step["reward"] for step in steps if step["reward"] is not None))


if __name__ == "__main__":
    main()
