"""`python -m tests.train.async_ranks FAULT [async_grpo's arguments]`: an asynchronous run without server and rollouts.

Scripted groups stand for them. The fault happens in step `STEP`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.train.played_groups import Pushes, ScriptedGroups
from verl_server.errors import ServerLaunchError
from verl_server.train import async_grpo
from verl_server.train import run as run_module
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.held_out import HELD_OUT
from verl_server.train.rollouts.rollout_process import RolloutProcessError

STEP = 2


def main(arguments: Sequence[str]) -> int:
    fault, *rest = arguments
    rank = int(os.environ.get("RANK", "0"))
    step = {"now": -1}
    servers = Pushes()

    def choose(playing: list[int]) -> list[int]:
        if step["now"] == STEP and fault == "error":
            raise RolloutProcessError("The episodes cannot be played.")
        if step["now"] == STEP and fault == "SIGTERM in a wait":
            return []
        if fault == "equal" and step["now"] >= 0:  # evaluations play on, as long as a step does
            return [number for number in playing if number < HELD_OUT][-2:]
        return playing[-2:]  # the newest first

    @contextlib.contextmanager
    def serving(*_: Any) -> Iterator[tuple[list[Any], list[str], list[None]]]:
        yield [], [], []

    @contextlib.contextmanager
    def scripted(*_: Any) -> Iterator[ScriptedGroups]:
        if fault == "launch":
            raise ServerLaunchError("The agent is wrong.")
        rollouts = ScriptedGroups(choose)
        rollouts.served = lambda: servers.pushed[-1]
        if fault == "equal":  # in every step, which has nothing to train on
            rollouts.rewards = lambda group, member: 1.0
        if fault == "equal rewards":  # in every other group
            rollouts.rewards = lambda group, member: float(member % 2 and group % 2)
        yield rollouts

    await_batch, whole_step = AsyncGRPO._await_batch, AsyncGRPO.step

    def stepped(run: AsyncGRPO, *arguments: Any) -> Any:
        result = whole_step(run, *arguments)
        step["now"] = -1
        return result

    def noted(run: AsyncGRPO) -> Any:
        step["now"] = run.next_step
        if run.next_step == STEP and fault.startswith("SIGTERM") and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return await_batch(run)

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (run_module, "serving", serving),
            (run_module, "RolloutServers", lambda *_, **__: servers),
            (run_module, "check_environments", lambda *_: None),
            (async_grpo, "open_rollouts", scripted),
            (async_grpo, "_LOOK_SECONDS", 0.05),
            (AsyncGRPO, "_await_batch", noted),
            (AsyncGRPO, "step", stepped),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        return async_grpo.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
