"""One rollout over several servers: episodes spread, leave a server that dies, and use only servers of the version."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fake_router import FakeRouter
from tests.engine.restartable_server import PARAMETERS, Server
from tests.fake_engine import FakeEngine
from tests.rollout.fakes import FakeEnvironment, WordRenderer, says
from tests.rollout.test_agent_loop import episode
from verl_server import HttpServerEngineAdapter
from verl_server.engine.http import RoutedEngine
from verl_server.errors import BadRequestError, ServerRestartedError, ServerUnavailableError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.engine_pool import EnginePool
from verl_server.rollout.environment import StepResult
from verl_server.rollout.episode import Limits
from verl_server.rollout.trajectory import Fault, StopReason, Task, Trajectory

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


def test_a_request_that_fails_while_its_server_comes_back_is_sent_again(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer, from the run before, arrives in the turn of the event loop in which the wait for the server ends."""

    async def play(engine: HttpServerEngineAdapter) -> list[str]:
        healed, answers = asyncio.Event(), list[str]()
        restarted = ServerRestartedError("the server was started again")

        async def generate(_: Any, __: Any, input_ids: list[int], **___: Any) -> str:
            answers.append(f"{input_ids[0]} asks run {engine.instance_id}")
            if engine.instance_id == "1":
                if input_ids[0] == 1:
                    await healed.wait()
                raise restarted
            return "done"

        async def until_healed(timeout: float, version: str | None) -> None:
            await healed.wait()
            engine._instance.id = "2"

        monkeypatch.setattr(engine, "async_generate", generate)
        monkeypatch.setattr(engine, "async_wait_until_healed", until_healed)
        engine._instance.id = "1"
        async with EnginePool([engine], 30.0) as pool:
            first = asyncio.ensure_future(pool.async_generate(input_ids=[0], session_id="a"))
            while pool._members[0].back is None:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the wait for the server has begun
            second = asyncio.ensure_future(pool.async_generate(input_ids=[1], session_id="b"))
            while len(answers) < 2:
                await asyncio.sleep(0)
            healed.set()
            assert await asyncio.wait_for(asyncio.gather(first, second), 30) == ["done"] * 2
        return answers

    with HttpServerEngineAdapter.attach(servers[0].url) as engine:
        answers = asyncio.run(play(engine))
    assert sorted(answers) == [f"{number} asks run {run}" for number in (0, 1) for run in (1, 2)]


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


def test_each_request_states_the_version_and_its_session(servers: list[Server]) -> None:
    """The server enforces the version. A router reads both from headers, however large the body is."""
    push(servers[0], "2@5f2c9a1e")
    router = FakeRouter(lambda: [servers[0].url])
    try:
        with AgentLoop(router.url, lambda: Acting(lambda: None), WordRenderer(), limits=LIMITS) as loop:
            for version in ("2@5f2c9a1e", ">=1@5f2c9a1e", None):
                running = loop.start(TASKS[:1], version=version)
                assert running.wait(60)
                assert running.result().trajectories[0].stop_reason is StopReason.DONE
    finally:
        router.stop()
    sent = [(headers, body) for _, path, headers, body in router.requests if path == "/generate"]
    demands = [
        {name: headers.get(f"x-verl-{name.lower()}-weight-version") for name in ("Min", "Exact")} for headers, _ in sent
    ]
    exact, least = {"Min": None, "Exact": "2@5f2c9a1e"}, {"Min": "1@5f2c9a1e", "Exact": None}
    assert demands == [exact] * 2 + [least] * 2 + [{"Min": None, "Exact": None}] * 2
    for headers, body in sent:
        assert headers["x-smg-routing-key"] == json.loads(body)["session_id"]
    bodies = [json.loads(body) for _, body in sent]
    assert [body.get("exact_weight_version") for body in bodies] == ["2@5f2c9a1e"] * 2 + [None] * 4
    assert [body.get("min_weight_version") for body in bodies] == [None] * 2 + ["1@5f2c9a1e"] * 2 + [None] * 2


def test_an_engine_that_names_no_run_gets_no_demand() -> None:
    """It runs in this process, or its server is of another project, which would not know the field."""
    requests: list[dict[str, Any]] = []

    class Other(FakeEngine):
        async def async_generate(self, *_: Any, **request: Any) -> Any:  # type: ignore[override]
            requests.append(request)
            return {}

    async def generate() -> None:
        async with EnginePool([Other()], 1.0, "1@5f2c9a1e") as pool:
            await pool.async_generate(input_ids=[1], session_id="a")

    asyncio.run(generate())
    assert requests == [{"return_logprob": False, "session_id": "a", "timeout": None}]


def part(loop: AgentLoop, version: str) -> list[Trajectory]:
    """Play one task as a part of a rollout, which does not raise if all generations fail."""
    play = loop.arun(TASKS[:1], version=version, slots=asyncio.Semaphore(1))
    return asyncio.run(asyncio.wait_for(play, 60)).trajectories


def test_a_version_that_was_superseded_ends_the_episode(servers: list[Server]) -> None:
    """It will not come back, so nobody waits for it. The end is the infrastructure's fault, not the policy's."""
    push(servers[0], "1@5f2c9a1e")
    act = once(lambda: push(servers[0], "2@5f2c9a1e"))
    with AgentLoop(servers[0].url, lambda: Acting(act), WordRenderer(), limits=LIMITS) as loop:
        (trajectory,) = part(loop, "1@5f2c9a1e")
    assert trajectory.stop_reason is StopReason.GENERATION_ERROR and trajectory.fault is Fault.INFRASTRUCTURE
    assert "VersionSupersededError" in str(trajectory.error)


@pytest.mark.parametrize("state", ["healthy", "stale"])
def test_a_router_that_refuses_is_lost_only_without_a_healthy_server(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A full queue of a healthy server ends the generation, as without a router. Otherwise a server is waited for."""
    monkeypatch.setattr("verl_server.engine.routed._REPORT_SECONDS", 0.0)
    push(servers[0], "1@5f2c9a1e")
    router = FakeRouter(lambda: [servers[0].url])
    generate = RoutedEngine._async_generate
    states: list[Any] = []

    async def refuse_once(self: RoutedEngine, body: dict[str, Any], timeout: float | None) -> Any:
        if not states:
            states.append(router.states.setdefault(servers[0].url, state))
            threading.Timer(0.3, lambda: router.states.update({servers[0].url: "healthy"})).start()
            raise ServerUnavailableError("The queue is full.")
        return await generate(self, body, timeout)

    monkeypatch.setattr(RoutedEngine, "_async_generate", refuse_once)
    try:
        with AgentLoop(router.url, lambda: Acting(lambda: None), WordRenderer(), limits=LIMITS) as loop:
            (trajectory,) = part(loop, "1@5f2c9a1e")
    finally:
        router.stop()
    assert trajectory.stop_reason is (StopReason.GENERATION_ERROR if state == "healthy" else StopReason.DONE)
