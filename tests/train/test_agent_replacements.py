"""`AgentGroups` replaces the episodes of an agent that the infrastructure ended, within the bound of each group."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse

from tests.rollout.agents.common import chat
from tests.rollout.fake_sessions import OWNER_KEY, fake_server
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask
from verl_server.rollout.trajectory import Fault, StopReason, by_episode
from verl_server.train import agent_groups
from verl_server.train.agent_groups import AgentGroups
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.run_tasks import make_tasks


async def ask_twice(session: AgentSession, task: AgentTask) -> None:
    """The second request may fail; by then the session has sampled tokens."""
    await chat(session, "say 1")
    await chat(session, "say 2")


def one(episode: AgentEpisode) -> float:
    return 1.0


@pytest.fixture(autouse=True)
def without_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server does not report the log-probabilities of the policy."""
    monkeypatch.setattr(agent_groups, "check_usable", lambda *_: None)


def play(tmp_path: Path, failing: int, replacements: int) -> Rollout:
    """Play one group of two episodes, one after the other. The server fails the first `failing` second requests."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"seed": 3}\n')
    module = "tests.train.test_agent_replacements"
    config = GRPOConfig(groups=1, group_size=2)
    args = TrainArgs(
        model_path="m",
        agent=f"{module}:ask_twice",
        tasks=str(tasks),
        reward=f"{module}:one",
        grpo=config,
        replacements=replacements,
        max_concurrency=1,
    )
    seconds = itertools.count()

    def policy(messages: list[dict[str, Any]]) -> Any:
        if messages[-1]["content"] == "say 2" and next(seconds) < failing:
            return JSONResponse({"error": "x"}, 500)
        return "1"

    async def main() -> Rollout:
        async with fake_server(policy) as fake:
            groups = AgentGroups(args)
            engine: Any = SimpleNamespace(url=fake.url, server_args=SimpleNamespace(api_key=OWNER_KEY))
            with groups.serving([engine]):
                return await groups.arun(make_tasks(0, config, 0, 1))

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_lost_episodes_are_replaced_and_kept_apart(tmp_path: Path) -> None:
    rollout = play(tmp_path, failing=2, replacements=2)
    assert {(t.stop_reason, t.fault, t.reward) for t in rollout.replaced} == {
        (StopReason.GENERATION_ERROR, Fault.INFRASTRUCTURE, None)
    }
    assert {(t.member, t.attempt) for t in rollout.replaced} == {(0, 0), (0, 1)}
    assert {(t.member, t.attempt, t.reward) for t in rollout.trajectories} == {(0, 2, 1.0), (1, 0, 1.0)}
    everything = [*rollout.trajectories, *rollout.replaced]
    assert len(by_episode(everything)) == 4  # attempts of one member are episodes of their own
    assert {t.task.seed for t in everything} == {0} and len({t.task.sampling_seed for t in everything}) == 4


def test_a_group_has_a_bound(tmp_path: Path) -> None:
    rollout = play(tmp_path, failing=9, replacements=1)
    assert len(by_episode(rollout.replaced)) == 1
    assert {(t.member, t.fault, t.reward) for t in rollout.trajectories} == {
        (0, Fault.INFRASTRUCTURE, None),
        (1, Fault.INFRASTRUCTURE, None),
    }
