"""A GRPO run whose launched server is killed during a rollout, on one rank or on several.

`python -m tests.train.healing_ranks MODEL FOLDER`: rank 0 kills the server with SIGKILL in the middle of an episode,
after all other ranks have finished theirs. Each rank writes what its steps gave into FOLDER/RANK.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import StepResult
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks, launch_engine, setup_ranks
from verl_server.train.servers import RolloutServers

KILL_STEP = 1
WAIT = 60.0
CONFIG = GRPOConfig(groups=4, group_size=4, epochs=1, minibatches=1, warmup_steps=1, learning_rate=1e-2)


class Game:
    """The number-guessing game in this process. Before its first answer, it calls `act`, once in the whole run."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._game = GuessNumber(numbers=3, guesses=3)
        self._act = act

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        return StepResult(await self._game.reset(seed), None, False)

    async def step(self, action: Any) -> StepResult:
        await self._act()
        return StepResult(*await self._game.step(action))

    async def close(self) -> None:
        pass


def main(model: str, folder: Path) -> None:
    device = setup_ranks("cpu", timeout=2 * WAIT)
    torch.set_num_threads(1)
    ranks = all_ranks(2 * WAIT)
    others = [folder / f"{rank}.finished" for rank in range(1, ranks.size)]
    trainer = PolicyTrainer(load_policy(model, device, compute_dtype=torch.float32), CONFIG, 3, device)
    small = {"dtype": "float32", "cpu_threads": 1, "kv_cache_gib": 0.1, "log_level": "warning"}
    killed: list[int] = []
    with launch_engine(model, device, rank_timeout=2 * WAIT, **small) as engine:

        async def kill() -> None:
            if ranks.rank == 0 and run.next_step == KILL_STEP and not killed:
                assert isinstance(engine.engine, HttpServerEngineAdapter) and engine.engine.pid is not None
                killed.append(engine.engine.pid)
                deadline = time.monotonic() + WAIT
                while not all(file.exists() for file in others) and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
                os.kill(killed[0], signal.SIGKILL)

        renderer = TextRenderer(AutoTokenizer.from_pretrained(model))
        limits = Limits(max_turns=3, max_new_tokens=1)
        with AgentLoop(str(engine.url), lambda: Game(kill), renderer, limits=limits) as loop:
            run = GRPO(trainer, RolloutServers([engine], ranks, restart_timeout=WAIT), loop, ranks)
            run.push()
            steps = []
            for number in range(3):
                ended: list[Any] = []

                def finished(trajectory: Any, number: int = number, ended: list[Any] = ended) -> None:
                    ended.append(trajectory)
                    if number == KILL_STEP and len(ended) == CONFIG.groups // ranks.size * CONFIG.group_size:
                        (folder / f"{ranks.rank}.finished").touch()

                steps.append(run.step(finished))
        pid = getattr(engine.engine, "pid", None)
    result = {
        "versions": [str(step.metrics.weight_version) for step in steps],
        "sampled": [sorted({v for t in step.rollout.trajectories for v in t.weight_versions if v}) for step in steps],
        "ends": [[str(t.stop_reason) for t in step.rollout.trajectories] for step in steps],
        "gaps": [step.metrics.logprob_gap for step in steps],
        "killed": killed,
        "pid": pid,
    }
    (folder / f"{ranks.rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
