"""The tool loop of the anthropic SDK. It asks the server to hold the conversation, and must not lose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from anthropic import BadRequestError, beta_async_tool
from conftest import Served

from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentSession, AgentTask

REQUEST: dict[str, Any] = {"model": "policy", "max_tokens": 1500, "messages": [{"role": "user", "content": "Press."}]}
HELLO: Any = {"role": "user", "content": "Hello"}
TURNS = 3


@beta_async_tool
async def press(button: Literal["red", "green"]) -> str:
    """Press a button."""
    return "pressed"


async def with_tool_runner(session: AgentSession, task: AgentTask) -> int:
    client = session.anthropic()
    choice: Any = {"type": "any"}
    runner = client.beta.messages.tool_runner(**REQUEST, tools=[press], tool_choice=choice, max_iterations=TURNS)
    return len([message async for message in runner])


async def with_thread(session: AgentSession, task: AgentTask) -> str:
    async with session.anthropic() as client:
        thread = client.beta.messages.thread(model="policy", max_tokens=8)
        with pytest.raises(BadRequestError, match="send the whole `messages` in each request"):
            await thread.send(HELLO)
        thread = client.beta.messages.thread(
            model="policy", max_tokens=8, unsupported_request_behavior="continue_unthreaded"
        )
        await thread.send(HELLO)
        await thread.send(HELLO)
    return "done"


@pytest.mark.parametrize(("agent", "turns"), [(with_tool_runner, TURNS), (with_thread, 2)])
def test_the_conversation_is_one_branch(serve: Callable[[str], Served], agent: Any, turns: int) -> None:
    task = AgentTask(input="")
    run = run_agents(agent, [task], servers=[serve("qwen3").server], reward=lambda e: 1.0, retries=0)
    (episode,) = run.episodes
    assert (episode.reason, episode.turns) == ("done", turns), episode.error
    (branch,) = run.trajectories
    assert len(branch.turns) == turns, "each turn continues the one before"
