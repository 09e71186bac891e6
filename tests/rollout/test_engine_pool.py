"""A rollout survives a restart of its server, and no token is sampled from weights that were not pushed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.restartable_server import Server
from tests.rollout.fakes import FakeEnvironment, WordRenderer, says
from verl_server import HttpServerEngineAdapter, ServerUnavailableError
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import UpdateWeightsFromDiskReq
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import StepResult
from verl_server.rollout.episode import Limits
from verl_server.rollout.trajectory import StopReason, Task

TASKS = [Task(seed=i) for i in range(4)]
WAIT = 30.0


@pytest.fixture
def server(text_folder: Path) -> Iterator[Server]:
    server = Server(text_folder)
    yield server
    server.stop()


@pytest.fixture
def trainer(server: Server) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter.attach(server.url) as trainer:
        trainer.update_weights_from_disk("/weights", weight_version="7")
        yield trainer


class RestartingEnvironment(FakeEnvironment):
    """An environment that restarts the server at the first step of any environment of the batch."""

    def __init__(self, restart: Callable[[], None]) -> None:
        super().__init__(says("a"), says("b"), says("c", 1.0, True))
        self._restart = restart

    async def step(self, action: Any) -> StepResult:
        await asyncio.to_thread(self._restart)
        return await super().step(action)


def once(act: Callable[[], None]) -> Callable[[], None]:
    lock, done = threading.Lock(), []

    def act_once() -> None:
        with lock:
            if not done:
                act()
            done.append(True)

    return act_once


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("settle", ["heal", "accept_restart"])
def test_episodes_wait_until_the_server_was_healed(
    server: Server, trainer: HttpServerEngineAdapter, monkeypatch: pytest.MonkeyPatch, settle: str, lockstep: bool
) -> None:
    waits = threading.Event()
    wait = HttpServerEngineAdapter.async_wait_until_healed

    async def announced(self: HttpServerEngineAdapter, timeout: float, version: str | None = None) -> None:
        waits.set()
        await wait(self, timeout, version)

    monkeypatch.setattr(HttpServerEngineAdapter, "async_wait_until_healed", announced)
    sampled_before: list[int] = []

    def heal() -> None:
        assert waits.wait(WAIT)
        sampled_before.append(server.generated)
        getattr(trainer, settle)()

    healing = threading.Thread(target=heal)
    healing.start()
    restart = once(server.restart)
    limits = Limits(max_new_tokens=4, restart_timeout=WAIT)
    with AgentLoop(server.url, lambda: RestartingEnvironment(restart), WordRenderer(), limits=limits) as loop:
        rollout = loop.run_lockstep(TASKS) if lockstep else loop.run(TASKS)
    healing.join(WAIT)
    assert sampled_before == [0], "no token may be sampled from the weights that the server loaded"
    assert [t.stop_reason for t in rollout.trajectories] == [StopReason.DONE] * len(TASKS), rollout
    assert server.generated > 0
    updates = [m for m in server.stack.scheduler.received if isinstance(m, UpdateWeightsFromDiskReq)]
    assert len(updates) == (1 if settle == "heal" else 0)


def test_episodes_wait_within_a_bound(server: Server, trainer: HttpServerEngineAdapter) -> None:
    limits = Limits(max_new_tokens=4, restart_timeout=0.2)
    restart = once(server.restart)
    with (
        AgentLoop(server.url, lambda: RestartingEnvironment(restart), WordRenderer(), limits=limits) as loop,
        pytest.raises(ServerUnavailableError, match="was started again"),
    ):
        loop.run(TASKS)
    assert server.generated == 0


def test_a_server_that_went_away_is_waited_for(server: Server, trainer: HttpServerEngineAdapter) -> None:
    """The server is down when the generation is requested; later the server is started and healed."""

    def come_back() -> None:
        server.start()
        trainer.heal()

    back = threading.Timer(0.3, come_back)

    def stop() -> None:
        server.stop()
        back.start()

    stop_once = once(stop)
    limits = Limits(max_new_tokens=4, restart_timeout=WAIT)
    with AgentLoop(server.url, lambda: RestartingEnvironment(stop_once), WordRenderer(), limits=limits) as loop:
        rollout = loop.run(TASKS)
    back.join(WAIT)
    assert all(t.stop_reason is StopReason.DONE for t in rollout.trajectories), rollout
    first = next(m for m in server.stack.scheduler.received if not isinstance(m, io.GetInternalStateReq))
    assert isinstance(first, UpdateWeightsFromDiskReq)
