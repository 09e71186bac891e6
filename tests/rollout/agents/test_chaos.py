"""Sixteen agents on a real server, some with faults: each ends with its reason, and the others are not affected."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentSession, AgentTask, Server
from verl_server.rollout.environment import EnvError
from verl_server.rollout.trajectory import StopReason

KEY = "owner"
AGENTS, TURNS = 16, 4
LIMITS = AgentLimits(seconds=40, idle_seconds=2, environment_seconds=1, restart_timeout=1, kill_grace=0.3)
ENDS = {
    "agent hangs": {StopReason.IDLE},
    "agent raises": {StopReason.AGENT_ERROR},
    "agent leaves a stream": {StopReason.AGENT_ERROR},
    "environment answers 500": {StopReason.ENV_ERROR},
    "environment hangs": {StopReason.ENV_TIMEOUT},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=4096)
    store = str(tmp_path_factory.mktemp("store"))
    small: dict[str, Any] = {"kv_cache_gib": 0.1, "cpu_threads": 1, "cpu_kernel_choice": "torch", "port": 0}
    with HttpServerEngineAdapter(model_path=str(folder), api_key=KEY, session_store=store, **small) as engine:
        assert engine.url is not None
        yield Server(engine.url, KEY)


class Counting:
    """Answers each text with its number, and rewards the last one."""

    def __init__(self, fault: str | None, at: int) -> None:
        self.tools: list[dict[str, Any]] = []
        self._fault, self._at, self._steps = fault, at, 0

    async def reset(self, seed: int | None) -> str:
        return f"begin {seed}"

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        self._steps += 1
        if self._steps == self._at and self._fault == "environment hangs":
            await asyncio.Event().wait()
        if self._steps == self._at and self._fault == "environment answers 500":
            raise EnvError("the environment answered 500")
        return f"step {self._steps}", float(self._steps == TURNS), self._steps == TURNS

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise AssertionError("no tools")

    async def close(self) -> None:
        pass


def play(server: Server, faults: dict[int, tuple[str, int]]) -> tuple[AgentRun, float]:
    async def agent(session: AgentSession, task: AgentTask) -> None:
        fault, at = faults.get(task.seed, (None, 0))
        assert session.environment is not None
        messages = [{"role": "user", "content": session.environment.observation}]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for turn in range(1, TURNS + 1):
                body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 1.0}
                if turn == at and fault == "agent hangs":
                    await asyncio.Event().wait()
                if turn == at and fault == "agent raises":
                    raise RuntimeError("the agent has a bug")
                if turn == at and fault == "agent leaves a stream":
                    more = body | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
                    async with client.stream("POST", f"{session.base_url}/chat/completions", json=more) as stream:
                        await anext(aiter(stream.aiter_bytes()))
                        raise ConnectionError("the agent's connection broke")
                answer = await client.post(f"{session.base_url}/chat/completions", json=body)
                answer.raise_for_status()
                text = answer.json()["choices"][0]["message"]["content"] or ""
                observation, _ = await session.environment.step(text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]

    def environment(task: AgentTask) -> Counting:
        return Counting(*faults.get(task.seed, (None, 0)))

    began = time.monotonic()
    tasks = [AgentTask(seed=i) for i in range(AGENTS)]
    result = run_agents(
        agent, tasks, servers=[server], environment=environment, limits=LIMITS, retries=0, seed=11, max_concurrency=8
    )
    return result, time.monotonic() - began


def test_faults_end_their_own_episode_only(server: Server) -> None:
    chance = random.Random(4)
    faulty = chance.sample(range(AGENTS), 2 * len(ENDS))
    faults = {seed: (list(ENDS)[i // 2], chance.randint(1, TURNS)) for i, seed in enumerate(faulty)}
    calm, _ = play(server, {})
    assert {episode.reason for episode in calm.episodes} == {StopReason.DONE}
    wild, _ = play(server, faults)
    assert sorted(episode.index for episode in wild.episodes) == list(range(AGENTS))
    expected = {t.task.seed: t for t in calm.trajectories}
    assert len(expected) == len(calm.trajectories) == AGENTS
    for episode in wild.episodes:
        seed = episode.task.seed
        assert episode.seconds < LIMITS.seconds
        if seed in faults:
            assert episode.reason in ENDS[faults[seed][0]], (faults[seed], episode.reason, episode.error)
            assert episode.reward is None and episode.error
        else:
            assert (episode.reason, episode.reward, episode.error) == (StopReason.DONE, 1.0, None)
    healthy = [t for t in wild.trajectories if t.task.seed not in faults]
    assert len(healthy) == AGENTS - len(faults)
    for trajectory in healthy:
        same = expected[trajectory.task.seed]
        assert (trajectory.tokens, trajectory.loss_mask) == (same.tokens, same.loss_mask)
        assert trajectory.logprobs == pytest.approx(same.logprobs, abs=1e-5)
    left = httpx.get(f"{server.url}/sessions", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False).json()
    assert left["sessions"] == [], "no session is left on the server"
