"""Weights are pushed while agents play: between two turns, and in the middle of one. Every token keeps its version."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from conftest import Served
from playing import AGENTS, GUESS, agent_named, as_params, check, environment, thought_bias

from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentRun, AgentTask
from verl_server.rollout.trajectory import Trajectory


class PushingGame:
    """A game that replaces the policy's weights before it answers its first and its third move."""

    def __init__(self, task: AgentTask, served: Served, versions: Iterator[str]) -> None:
        self._game = environment(task)
        self._served, self._versions = served, versions
        self._moves = 0
        self.tools: list[dict[str, Any]] = []

    async def reset(self, seed: int | None) -> str:
        return await self._game.reset(seed)

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        self._moves += 1
        if self._moves in (1, 3):
            await asyncio.to_thread(self._served.push, next(self._versions), "retract")
        return await self._game.step(text)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return await self._game.call(name, arguments)

    async def close(self) -> None:
        await self._game.close()


@pytest.fixture
def served(serve: Callable[[str], Served]) -> Served:
    return serve("qwen3")


def versions_of(branch: Trajectory) -> list[list[str]]:
    """Return the versions of each turn, in order."""
    return [
        [version for version, _ in itertools.groupby(branch.weight_versions[slice(*turn.action_span)])]
        for turn in branch.turns
    ]


@pytest.mark.parametrize("agent", AGENTS)
def test_pushes_between_turns(served: Served, agent: str) -> None:
    bias = thought_bias(served)
    versions = itertools.cycle(["2", "3", "default"])
    run = run_agents(
        agent_named(agent),
        [GUESS],
        servers=[served.server],
        environment=lambda task: PushingGame(task, served, versions),
        group_size=3,
        retries=0,
        sampling_params=as_params(bias),
    )
    assert [episode.reason for episode in run.episodes] == ["done"] * 3, [e.error for e in run.episodes]
    assert len(run.trajectories) == 3
    assert max(len(set(itertools.chain(*versions_of(branch)))) for branch in run.trajectories) > 1
    assert check(served, run, bias) > 100


async def streaming_openai(session: Any, first: Callable[[], Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Begin."}]
    async with session.openai() as client:
        for turn in range(3):
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            text = ""
            async for chunk in stream:
                if turn == 1 and not text:
                    await first()
                text += chunk.choices[0].delta.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]


async def streaming_anthropic(session: Any, first: Callable[[], Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Begin."}]
    async with session.anthropic() as client:
        for turn in range(3):
            async with client.messages.stream(model="policy", max_tokens=2000, messages=messages) as stream:
                text = ""
                async for part in stream.text_stream:
                    if turn == 1 and not text:
                        await first()
                    text += part
                message = await stream.get_final_message()
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Go on."}]


@pytest.mark.parametrize("talk", [streaming_openai, streaming_anthropic])
def test_a_push_in_the_middle_of_a_turn(served: Served, talk: Any) -> None:
    async def agent(session: Any, task: AgentTask) -> None:
        await talk(session, lambda: asyncio.to_thread(served.push, "2", "retract"))

    run: AgentRun = run_agents(
        agent,
        [AgentTask()],
        servers=[served.server],
        reward=lambda episode: 1.0,
        retries=0,
        forced_sampling_params={"max_new_tokens": 500, "ignore_eos": True},
    )
    assert [episode.reason for episode in run.episodes] == ["done"], run.episodes[0].error
    (branch,) = run.trajectories
    assert versions_of(branch) == [["default"], ["default", "2"], ["2"]]
    assert served.recomputation.check(branch, {}, None) == 1500
    other = msgspec.structs.replace(branch, weight_versions=[name and "3" for name in branch.weight_versions])
    with pytest.raises(AssertionError, match="of version 3"):
        served.recomputation.check(other, {}, None)
