"""One rollout over several servers: episodes spread, leave a server that dies, and use only servers of the version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.restartable_server import PARAMETERS, Server
from tests.rollout.fakes import FakeEnvironment, WordRenderer, says
from tests.rollout.test_agent_loop import episode
from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import StepResult
from verl_server.rollout.episode import Limits
from verl_server.rollout.trajectory import StopReason, Task

TASKS = [Task(seed=i) for i in range(6)]
LIMITS = Limits(max_new_tokens=4, restart_timeout=30.0)
TENSORS = [(f"w{i}", torch.ones(2)) for i in range(PARAMETERS)]


@pytest.fixture
def servers(text_folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = [Server(text_folder) for _ in range(3)]
        for server in servers:
            stack.callback(server.stop)
        yield servers


def push(server: Server, version: str) -> None:
    with HttpServerEngineAdapter.attach(server.url) as trainer:
        trainer.update_weights_from_tensor(TENSORS, weight_version=version)


class Acting(FakeEnvironment):
    """An environment that acts, once in the whole rollout, before its first answer to an action."""

    def __init__(self, act: Any) -> None:
        super().__init__(says("a"), says("b"), says("c", 1.0, True))
        self._act = act

    async def step(self, action: Any) -> StepResult:
        await asyncio.to_thread(self._act)
        return await super().step(action)


def once(act: Any) -> Any:
    lock, done = threading.Lock(), list[bool]()

    def act_once() -> None:
        with lock:
            if not done:
                act()
            done.append(True)

    return act_once


def test_episodes_spread_over_the_servers(servers: list[Server]) -> None:
    with AgentLoop(
        [server.url for server in servers], lambda: Acting(lambda: None), WordRenderer(), limits=LIMITS
    ) as loop:
        rollout = loop.run(TASKS)
    assert all(t.stop_reason is StopReason.DONE for t in rollout.trajectories)
    assert [server.generated for server in servers] == [4, 4, 4], "two episodes of two turns each"


def test_episodes_of_a_server_that_dies_continue_on_the_others(servers: list[Server]) -> None:
    stop = once(servers[1].stop)
    with AgentLoop([server.url for server in servers], lambda: Acting(stop), WordRenderer(), limits=LIMITS) as loop:
        rollout = loop.run(TASKS)
    assert all(t.stop_reason is StopReason.DONE for t in rollout.trajectories), rollout
    assert servers[0].generated + servers[2].generated >= 8


def test_a_server_of_another_version_gets_no_episode_until_it_has_the_version(servers: list[Server]) -> None:
    """The second server missed the push. It gets this version in the middle of the rollout, and the first one dies."""
    for server, version in zip(servers[:2], ["2@5f2c9a1e", "1@5f2c9a1e"], strict=True):
        push(server, version)

    def change() -> None:
        assert servers[1].generated == 0
        push(servers[1], "2@5f2c9a1e")
        servers[0].stop()

    act = once(change)
    with AgentLoop([server.url for server in servers[:2]], lambda: Acting(act), WordRenderer(), limits=LIMITS) as loop:
        running = loop.start(TASKS, version="2@5f2c9a1e")
        assert running.wait(60)
        rollout = running.result()
        assert loop.stranded("2@5f2c9a1e") is None
        assert "serves version '2@5f2c9a1e', not '3@5f2c9a1e'" in str(loop.stranded("3@5f2c9a1e"))
    assert all(t.stop_reason is StopReason.DONE for t in rollout.trajectories), rollout
    assert servers[1].generated > 0


def test_a_rollout_without_a_server_is_stranded_until_one_is_healed(servers: list[Server]) -> None:
    push(servers[0], "7@5f2c9a1e")
    restart = once(servers[0].restart)
    with AgentLoop(servers[0].url, lambda: Acting(restart), WordRenderer(), limits=LIMITS) as loop:
        running = loop.start(TASKS, version="7@5f2c9a1e")
        while "which no engine has confirmed" not in str(loop.stranded("7@5f2c9a1e")):
            assert not running.wait(0.01), "it must not play on weights that were not pushed"
        push(servers[0], "7@5f2c9a1e")
        assert running.wait(60)
        ended = running.result().trajectories
        assert all(t.stop_reason is StopReason.DONE for t in ended), [(t.stop_reason, t.error) for t in ended]


def test_engines_that_differ_are_refused(servers: list[Server]) -> None:
    servers[1].restart(reasoning_parser="deepseek-r1")
    urls = [server.url for server in servers[:2]]
    with pytest.raises(BadRequestError, match="must have the same reasoning_parser"):
        AgentLoop(urls, episode, WordRenderer())
    with pytest.raises(BadRequestError, match="at least one engine"):
        AgentLoop([], episode, WordRenderer())


def test_lock_step_takes_one_engine(servers: list[Server]) -> None:
    with (
        AgentLoop([server.url for server in servers[:2]], episode, WordRenderer()) as loop,
        pytest.raises(BadRequestError, match="this loop has 2: use `run`"),
    ):
        loop.run_lockstep(TASKS)
