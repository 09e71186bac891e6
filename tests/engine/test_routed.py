"""Engines, rollouts and agents in front of a real router, over servers without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.restartable_server import PARAMETERS, Server
from tests.engine.router_process import RouterProcess
from tests.rollout.fakes import FakeEnvironment, WordRenderer, says
from tests.server.sessions.live import ADMIN_KEY, API_KEY, LiveServer
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.engine.http import RoutedEngine
from verl_server.errors import VersionBehindError, VersionSupersededError
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentSession, AgentTask
from verl_server.rollout.agents.types import Server as AgentServer
from verl_server.rollout.environment import StepResult
from verl_server.rollout.episode import Limits
from verl_server.rollout.trajectory import StopReason, Task

TENSORS = [(f"w{i}", torch.ones(2)) for i in range(PARAMETERS)]
EPISODES = 6
FOUR = {"max_new_tokens": 4}
LINE = "5f2c9a1e"
OLD, NEW, NEXT = (f"{number}@{LINE}" for number in (1, 2, 3))


@pytest.fixture
def servers(text_folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = [Server(text_folder) for _ in range(2)]
        for server in servers:
            stack.callback(server.stop)
        yield servers


@pytest.fixture
def router(servers: list[Server], tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess([server.url for server in servers], tmp_path, "--hold-seconds", "2") as router:
        assert eventually(lambda: router.is_healthy(2)), router.report()
        yield router


@pytest.fixture
def engine(router: RouterProcess) -> Iterator[RoutedEngine]:
    with HttpServerEngineAdapter.attach(router.url) as engine:
        assert isinstance(engine, RoutedEngine)
        yield engine


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("chat"), "qwen3", init_std=0.2, max_position_embeddings=2048)


def versions(servers: list[Server]) -> list[str]:
    return [server.stack.scheduler.version for server in servers]


def test_a_push_reaches_all_servers_and_is_served_at_once(
    servers: list[Server], router: RouterProcess, engine: RoutedEngine
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version=OLD)
    assert versions(servers) == [OLD] * 2
    assert router.report()["committed"] == OLD
    result = engine.generate("a", FOUR, exact_weight_version=OLD)
    assert result["meta_info"]["weight_version"] == OLD
    engine.update_weights_from_tensor(TENSORS, weight_version=NEW)
    assert engine.generate("a", FOUR, min_weight_version=NEW)["meta_info"]["weight_version"] == NEW
    with pytest.raises(VersionSupersededError):
        engine.generate("a", FOUR, exact_weight_version=OLD)
    with pytest.raises(VersionBehindError):
        engine.generate("a", FOUR, min_weight_version=NEXT)


def test_a_server_that_dies_is_left_out_and_healed_by_the_next_push(
    servers: list[Server], router: RouterProcess, engine: RoutedEngine
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version=OLD)
    servers[0].stop()
    engine.update_weights_from_tensor(TENSORS, weight_version=NEW)
    assert engine.generate("a", FOUR)["meta_info"]["weight_version"] == NEW
    servers[0].start()
    assert eventually(lambda: router.states()[servers[0].url] == "stale"), router.report()
    assert engine.generate("a", FOUR)["meta_info"]["weight_version"] == NEW
    engine.update_weights_from_tensor(TENSORS, weight_version=NEXT)
    assert versions(servers) == [NEXT] * 2
    assert eventually(lambda: router.is_healthy(2)), router.report()


def test_a_resumed_trainer_heals_servers_that_are_all_stale(servers: list[Server], router: RouterProcess) -> None:
    with HttpServerEngineAdapter.attach(router.url) as engine:
        engine.update_weights_from_tensor(TENSORS, weight_version=OLD)
    for server in servers:
        server.restart()
    assert eventually(lambda: list(router.states().values()) == ["stale"] * 2), router.report()
    with HttpServerEngineAdapter.attach(router.url) as engine:
        assert engine.lost() is not None
        engine.heal(TENSORS, version="1@0a0a0a0a")
        assert engine.generate("a", FOUR)["meta_info"]["weight_version"] == "1@0a0a0a0a"


def test_a_router_that_is_started_again_changes_nothing_for_its_engines(
    servers: list[Server], router: RouterProcess, engine: RoutedEngine
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version=OLD)
    router.kill()
    engine.update_weights_from_tensor(TENSORS, weight_version=NEW)
    router.start()
    assert engine.generate("a", FOUR, exact_weight_version=NEW)["meta_info"]["weight_version"] == NEW


class Acting(FakeEnvironment):
    """An environment that acts before its first answer to an action."""

    def __init__(self, act: Any) -> None:
        super().__init__(says("a"), says("b"), says("c", 1.0, True))
        self._act = act

    async def step(self, action: Any) -> StepResult:
        act, self._act = self._act, lambda: None
        await asyncio.to_thread(act)
        return await super().step(action)


LIMITS = Limits(max_new_tokens=4, restart_timeout=30.0)


def test_an_agent_loop_plays_on_all_servers_of_a_router(
    servers: list[Server], router: RouterProcess, engine: RoutedEngine
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version=OLD)
    with AgentLoop(router.url, lambda: Acting(lambda: None), WordRenderer(), limits=LIMITS) as loop:
        rollout = asyncio.run(loop.arun([Task(seed=i) for i in range(8)], version=OLD))
    assert [t.stop_reason for t in rollout.trajectories] == [StopReason.DONE] * 8
    assert {v for t in rollout.trajectories for v in t.weight_versions if v} == {OLD}
    assert all(server.generated for server in servers)


def test_episodes_go_on_when_a_server_and_the_router_die(
    servers: list[Server], router: RouterProcess, engine: RoutedEngine
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version=OLD)

    def kill() -> None:
        servers[0].stop()
        router.kill()
        router.start()

    acts = iter([kill, *[lambda: None] * 7])
    with AgentLoop(router.url, lambda: Acting(next(acts)), WordRenderer(), limits=LIMITS) as loop:
        rollout = asyncio.run(loop.arun([Task(seed=i) for i in range(8)], version=OLD))
    assert [(t.stop_reason, t.error) for t in rollout.trajectories] == [(StopReason.DONE, None)] * 8


def test_episodes_wait_until_the_servers_of_a_router_are_healed(
    servers: list[Server], router: RouterProcess, engine: RoutedEngine
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version=OLD)

    def restart_all() -> None:
        for server in servers:
            server.restart()
        assert eventually(lambda: list(router.states().values()) == ["stale"] * 2), router.report()

    acts = iter([restart_all, *[lambda: None] * 3])
    with AgentLoop(router.url, lambda: Acting(next(acts)), WordRenderer(), limits=LIMITS) as loop:
        running = loop.start([Task(seed=i) for i in range(4)], version=OLD)
        assert eventually(lambda: loop.stranded(OLD) is not None, 30)
        engine.heal(TENSORS, version=OLD)
        assert running.wait(60)
        rollout = running.result()
    assert [t.stop_reason for t in rollout.trajectories] == [StopReason.DONE] * 4
    assert {v for t in rollout.trajectories for v in t.weight_versions if v} == {OLD}


@pytest.mark.timeout(300)
def test_agents_play_through_a_router(tiny_chat: Path, tmp_path: Path) -> None:
    """A server is killed while each agent waits between two turns. Its episodes begin again on the other server."""
    between, killed = threading.Semaphore(0), threading.Event()

    async def agent(session: AgentSession, task: AgentTask) -> None:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        async with session.http() as client:
            for turn in range(2):
                body = {"model": "m", "messages": messages, "max_tokens": 4}
                reply = (await client.post("/chat/completions", json=body)).raise_for_status().json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "two"}]
                if turn == 0 and not killed.is_set():
                    between.release()
                    await asyncio.to_thread(killed.wait, 100)

    def play(url: str) -> AgentRun:
        limits = AgentLimits(seconds=200, restart_timeout=60)
        return run_agents(
            agent,
            [AgentTask(seed=i) for i in range(EPISODES)],
            servers=[AgentServer(url, API_KEY)],
            reward=lambda episode: 1.0,
            limits=limits,
            retries=3,
            version=OLD,
        )

    auto: Any = AutoModelForCausalLM
    weights = auto.from_pretrained(tiny_chat, dtype=torch.float32).state_dict()
    with ExitStack() as stack:
        live = [stack.enter_context(LiveServer(tiny_chat, tmp_path / f"log{i}", admin_key=ADMIN_KEY)) for i in range(2)]
        key = tmp_path / "key"
        key.write_text(API_KEY)
        options = ("--server-api-key-file", str(key), "--hold-seconds", "3")
        router = stack.enter_context(RouterProcess([server.url for server in live], tmp_path, *options))
        engine = stack.enter_context(HttpServerEngineAdapter.attach(router.url, API_KEY, ADMIN_KEY))
        engine.update_weights_from_tensor(weights.items(), weight_version=OLD)
        assert eventually(lambda: router.is_healthy(2)), router.report()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(killed.set)
        running = pool.submit(play, router.url)
        assert all(between.acquire(timeout=60) for _ in range(EPISODES))
        placed = [len(server.owner("GET", "/sessions")["sessions"]) for server in live]
        live[0].kill()
        killed.set()
        run = running.result(200)
    assert sum(placed) == EPISODES and all(placed), "the sessions must spread over the servers"
    ends = [(e.reason, e.error) for e in run.episodes if e.final]
    assert ends == [(StopReason.DONE, None)] * EPISODES
    assert sum(not e.final for e in run.episodes) == placed[0], "no episode of the other server was disturbed"
    assert {v for t in run.trajectories for v in t.weight_versions if v} == {OLD}
