"""Calls that run an event loop of their own say in a notebook what to call instead."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.rollout.fakes import WordRenderer
from tests.rollout.test_agent_loop import FakeEngine, episode
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.environment_check import check_environment
from verl_server.rollout.trajectory import Task

TASKS = [Task(seed=0, episode_id="0", sampling_seed=0)]


async def never() -> None:
    raise AssertionError("nobody awaits this")


async def agent(task: Any, session: Any) -> None:
    raise AssertionError("no agent plays")


CALLS: dict[str, tuple[Callable[[AgentLoop], Any], str]] = {
    "run": (lambda loop: loop.run(TASKS), r"Use `await loop\.arun\(tasks\)`"),
    "run_lockstep": (lambda loop: loop.run_lockstep(TASKS), r"to_thread\(loop\.run_lockstep, tasks\)"),
    "run_async": (lambda loop: loop.run_async(never()), "Await the coroutine itself"),
    "run_agents": (lambda loop: run_agents(agent, [], servers=["http://localhost:1"]), "await arun_agents"),
    "check_environment": (lambda loop: check_environment("http://localhost:1", None, EnvTimeouts()), "to_thread"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_running_loop_names_the_remedy(name: str) -> None:
    call, remedy = CALLS[name]

    async def cell() -> None:
        with AgentLoop(FakeEngine(), episode, WordRenderer()) as loop, pytest.raises(BadRequestError) as caught:
            call(loop)
        assert "as in a notebook" in str(caught.value)
        assert caught.match(remedy)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited
        asyncio.run(cell())


def test_a_loop_closes_in_a_notebook_after_calls_in_other_threads() -> None:
    async def cell() -> int:
        with AgentLoop(FakeEngine(), episode, WordRenderer()) as loop:
            own = await loop.arun(TASKS)
            batch = await asyncio.to_thread(loop.run_lockstep, TASKS)
            return len(own.trajectories) + len(batch.trajectories)

    assert asyncio.run(cell()) == 2
