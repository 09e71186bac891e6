"""GRPO on agents that ask for special sampling: what is trained must be what was sampled.

    python examples/real_model.py smollm2
    python -m benchmarks.agent_sampling --model smollm2 --out runs/agent_sampling
    python -m benchmarks.agent_sampling --model smollm2 --players tools --steps 40 --out runs/tools

Each player is an agent in the game of `examples/sums.py` and trains a policy of its own, in a process of its own:

- plain: asks for nothing.
- tools: forces a call of a tool whose argument is the number, so that a mask decides about most tokens.
- logit_bias: asks for a bias on the digits. The trainer's sampling wins.
- top_p: asks for top-p 0.1 and temperature 0.3. The trainer's sampling wins.

Prints one JSON line for each player: exit status, rewards, the largest gap and KL of recorded and recomputed
log-probabilities, the share of clipped tokens, the share of sampled tokens beside which a mask allowed no other one,
and the sampling of the last step's turns that was overridden. A gap as that of `plain` and the exit status 0 are right.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from verl_server.rollout.agents.types import AgentSession, AgentTask
from verl_server.rollout.environments.env_server import EnvServer

Player = Literal["plain", "tools", "logit_bias", "top_p"]
ROOT = Path(__file__).parents[1]
SUMS = f"{ROOT / 'examples' / 'sums.py'}:Sums"
TOOL = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Give the answer",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 199}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}
DIGITS = {str(token): 4.0 for token in range(32, 42)}
"""A bias on the ten digits of SmolLM2's vocabulary."""


@dataclass(frozen=True)
class Args:
    model: Path
    """Model folder."""
    out: Path = Path("runs/agent_sampling")
    """Folder of the runs. It must not exist yet."""
    players: tuple[Player, ...] = ("plain", "tools", "logit_bias", "top_p")
    """Runs, one after the other."""
    steps: int = 12
    """Training steps of a run."""
    groups: int = 16
    """Groups of 8 episodes in a step."""
    options: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of the trainer, after `--`."""


async def plain(session: AgentSession, task: AgentTask) -> None:
    await _play(session, {})


async def tools(session: AgentSession, task: AgentTask) -> None:
    await _play(session, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 48})


async def logit_bias(session: AgentSession, task: AgentTask) -> None:
    await _play(session, {"logit_bias": DIGITS})


async def top_p(session: AgentSession, task: AgentTask) -> None:
    await _play(session, {"top_p": 0.1, "temperature": 0.3})


async def _play(session: AgentSession, asked: dict[str, Any]) -> None:
    """Play one game. `asked`: fields of each request."""
    game = session.environment
    assert game is not None
    messages: list[Any] = [{"role": "user", "content": game.observation}]
    async with session.http() as client:
        while not game.done:
            body = {"model": "policy", "messages": messages, "max_tokens": 16} | asked
            reply = await client.post("chat/completions", json=body)
            if reply.is_error:
                raise RuntimeError(reply.text)
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            text = message["content"] or ""
            for call in message.get("tool_calls") or ():
                text = str(json.loads(call["function"]["arguments"])["number"])
            seen, _ = await game.step(text)
            messages.append({"role": "user", "content": seen})


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True)
    with EnvServer(SUMS) as environment:
        for player in args.players:
            print(json.dumps(_run(args, player, environment.url)), flush=True)


def _run(args: Args, player: Player, url: str) -> dict[str, Any]:
    """Train with one player, and return its figures."""
    out = args.out / player
    options = {
        "--model-path": args.model,
        "--env-url": url,
        "--agent": f"{__file__}:{player}",
        "--out": out,
        "--steps": args.steps,
        "--max-turns": 3,
        "--max-new-tokens": 48,
        "--save-every": 0,
        "--server.chat-template": ROOT / "tests" / "real" / "tools_template.jinja",
        "--grpo.groups": args.groups,
        "--grpo.learning-rate": 5e-5,
    }
    words = [str(word) for option in options.items() for word in option]
    began = time.monotonic()
    with (args.out / f"{player}.log").open("w") as log:
        command = [sys.executable, "-m", "verl_server.train.grpo", *words, *args.options]
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    return {
        "player": player,
        "exit_status": status,
        "seconds": round(time.monotonic() - began, 1),
        **_figures(_lines(out / "metrics.jsonl")),
        "overridden": dict(_overridden(_lines(out / "trajectories-rank0.jsonl"))),
    }


def _figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    trained = [step for step in steps if step["skipped"] is None]
    if not trained:
        return {"steps": 0, "skipped": [step["skipped"] for step in steps]}
    third = max(1, len(trained) // 3)

    def largest(name: str) -> float:
        return max(float(step[name]) for step in trained if step[name] is not None)

    def reward(part: list[dict[str, Any]]) -> float:
        return round(statistics.mean(float(step["reward"]) for step in part), 3)

    return {
        "steps": len(trained),
        "reward": [
            round(statistics.mean(s["reward"] for s in part), 3) for part in (trained[:third], trained[-third:])
        ],
        "logprob_gap": largest("logprob_gap"),
        "logprob_gap_mean": largest("logprob_gap_mean"),
        "logprob_kl": largest("logprob_kl"),
        "clip_share": max(step["losses"]["clip_fraction"] for step in trained),
        "forced_share": round(statistics.mean(step["forced_share"] or 0.0 for step in trained), 3),
    }


def _overridden(trajectories: list[dict[str, Any]]) -> Counter[str]:
    """Count the overridden fields of the turns of the last step."""
    last = max((trajectory["step"] for trajectory in trajectories), default=0)
    turns = [turn for line in trajectories if line["step"] == last for turn in line["turns"]]
    return Counter(name for turn in turns for name in turn.get("overridden") or ())


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main()
