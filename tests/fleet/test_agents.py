"""Many agents play through the router while a server is killed and started again with its session store.

Each agent repeats its turns until they are answered, as an SDK does. All of them finish, and sample what they sample
without a disturbance: the session's seed draws the tokens, whichever server has the session.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.servers import KEY, OWNER, Fleet, Server, make_model, version
from tests.rollout.agents.chaos import MOST_TOKENS, FaultPlan, HttpEnvironment, environments
from tests.rollout.agents.redraw import Redraw
from tests.waiting import eventually
from verl_server.rollout.agents.run import arun_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentSession, AgentTask
from verl_server.rollout.agents.types import Server as Address
from verl_server.rollout.trajectory import StopReason, Trajectory

ROUNDING = 1e-4
LIMITS = AgentLimits(seconds=200, idle_seconds=150, restart_timeout=100)
PLAN = FaultPlan(7)
"""No faults, and 3 to 5 turns of each agent."""


@dataclass
class Agents:
    """Agents that note what they got. `turns` counts all replies."""

    servers: dict[int, str] = field(default_factory=dict)
    """Task -> URL of the server that answered."""
    said: dict[int, list[list[int]]] = field(default_factory=dict)
    trouble: dict[int, list[str]] = field(default_factory=dict)
    turns: int = 0

    async def play(self, session: AgentSession, task: AgentTask) -> None:
        assert session.environment is not None
        messages = [{"role": "user", "content": session.environment.observation}]
        said, done = self.said.setdefault(task.seed, []), False
        async with session.http() as client:
            while not done:
                body = {
                    "model": "m",
                    "messages": messages,
                    "max_tokens": MOST_TOKENS,
                    "temperature": 1.0,
                    "return_token_ids": True,
                }
                answer = await self._answered(client, body, f"{len(said)}", task.seed)
                (choice,) = answer["choices"]
                said.append(choice["token_ids"])
                self.turns += 1
                text = choice["message"]["content"]
                observation, done = await session.environment.step(text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]

    async def _answered(self, client: httpx.AsyncClient, body: Any, name: str, task: int) -> Any:
        while True:
            try:
                answer = await client.post("/chat/completions", json=body, headers={"Idempotency-Key": name})
            except httpx.HTTPError as error:
                self.trouble.setdefault(task, []).append(type(error).__name__)
            else:
                if answer.status_code == 200:
                    assert (
                        self.servers.setdefault(task, answer.headers["x-verl-server"])
                        == answer.headers["x-verl-server"]
                    )
                    return answer.json()
                assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
                self.trouble.setdefault(task, []).append(answer.headers["x-verl-error"])
            await asyncio.sleep(0.1)


@dataclass
class Played:
    run: AgentRun
    agents: Agents
    trajectories: dict[int, Trajectory]
    victim: str = ""


def play(fleet: Fleet, count: int, *, kills: bool) -> Played:
    agents = Agents()

    async def kill() -> str:
        while agents.turns < 2 * count:
            await asyncio.sleep(0.005)
        used = Counter(agents.servers.values())
        victim = fleet.server(used.most_common(1)[0][0])
        victim.signal(signal.SIGSTOP)  # until it has requests that it will not answer
        assert await asyncio.to_thread(eventually, lambda: fleet.requests(victim) >= 8)
        await asyncio.to_thread(victim.kill)
        await asyncio.to_thread(fleet.heal)
        return victim.url

    async def run() -> tuple[AgentRun, str]:
        async with environments(PLAN) as served:
            options: dict[str, Any] = {
                "servers": [Address(fleet.router.url, KEY)],
                "environment": lambda task: HttpEnvironment(served.url, task.seed),
                "limits": LIMITS,
                "retries": 0,
                "max_concurrency": count,
            }
            tasks = [AgentTask(seed=i) for i in range(count)]
            playing = asyncio.ensure_future(arun_agents(agents.play, tasks, seed=1, **options))
            victim = await kill() if kills else ""
            return await playing, victim

    played, victim = asyncio.run(asyncio.wait_for(run(), 240))
    ends = Counter(episode.reason for episode in played.episodes)
    assert ends == {StopReason.DONE: count}, [e.error for e in played.episodes if e.error][:3]
    by_task = {trajectory.task.seed: trajectory for trajectory in played.trajectories}
    assert len(by_task) == len(played.trajectories) == count, "each session has one branch"
    return Played(played, agents, by_task, victim)


def check_records(played: Played, label: str) -> None:
    """Assert that each record has what its agent got, once, from one version."""
    for task, trajectory in played.trajectories.items():
        places = [slice(*turn.action_span) for turn in trajectory.turns]
        assert [trajectory.tokens[place] for place in places] == played.agents.said[task]
        assert {name for place in places for name in trajectory.weight_versions[place]} == {label}


def differing(model: Redraw, calm: Played, wild: Played) -> list[int]:
    """Return the tasks whose tokens differ. Assert that theirs are what the seeds draw, within rounding."""
    found = [task for task, each in wild.trajectories.items() if each.tokens != calm.trajectories[task].tokens]
    for task in found:
        for played in (calm, wild):
            lost, errors = model.check(played.trajectories[task])
            assert float(lost.max()) < ROUNDING and float(errors.max()) < ROUNDING, task
    return found


def left(server: Server) -> int:
    answer = httpx.get(f"{server.url}/sessions", headers=OWNER, trust_env=False, timeout=60)
    return len(answer.raise_for_status().json()["sessions"])


@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_agents_outlive_a_server_behind_the_router(tmp_path: Path) -> None:
    count, model = 256, make_model(tmp_path / "model")
    with Fleet(tmp_path, model) as fleet:
        fleet.push_all()
        calm = play(fleet, count, kills=False)
        wild = play(fleet, count, kills=True)
        check_records(calm, version(1))
        check_records(wild, version(1))
        assert not calm.agents.trouble
        hit = {task for task, server in wild.agents.servers.items() if server == wild.victim}
        assert wild.agents.trouble.keys() <= hit, "whoever's server lives is not disturbed"
        different = differing(Redraw(model), calm, wild)
        repeated = len(wild.agents.trouble)
        print(f"{count} agents, {len(hit)} on the killed server, {repeated} repeated turns, {len(different)} differ")
        assert len(different) <= count // 50
        assert repeated >= 8, "the kill was in the middle"
        assert [left(server) for server in fleet.servers] == [0, 0, 0]
