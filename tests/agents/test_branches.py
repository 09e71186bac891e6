"""Agents that edit their history, ask twice, or have sub-agents: each branch of the export is what was sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Served
from playing import SUM, as_params, check, environment, thought_bias, tools_for

from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentTask

FREE: dict[str, Any] = {"model": "policy", "max_tokens": 24}


async def openai_agent(session: Any, task: AgentTask) -> None:
    """Draw samples, ask again, let a sub-agent work, call a tool with a compacted history."""
    forced: dict[str, Any] = {"model": "policy", "tools": tools_for("openai", task), "tool_choice": "required"}
    async with session.openai() as client:
        chat = client.chat.completions
        system = {"role": "system", "content": "Be brief."}
        messages: list[Any] = [system, {"role": "user", "content": session.environment.observation}]
        samples = await chat.create(messages=messages, n=2, **FREE)
        for choice in samples.choices:
            await chat.create(messages=[*messages, choice.message, {"role": "user", "content": "And then?"}], **FREE)
        await chat.create(messages=messages, **FREE)
        helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is a sum?"}]
        helped = await chat.create(messages=helper, **FREE)
        await chat.create(messages=[*helper, helped.choices[0].message, {"role": "user", "content": "Why?"}], **FREE)
        messages = [system, {"role": "user", "content": "In short: " + session.environment.observation[:40]}]
        called = (await chat.create(messages=messages, parallel_tool_calls=False, **forced)).choices[0].message
        (call,) = called.tool_calls
        result, _ = await session.environment.step(json.loads(call.function.arguments)["move"])
        messages += [called, {"role": "tool", "tool_call_id": call.id, "content": result}]
        await chat.create(messages=messages, tools=forced["tools"], tool_choice="none", **FREE)
        messages[-1] = messages[-1] | {"content": "(the result is left out)"}
        await chat.create(messages=messages, tools=forced["tools"], tool_choice="none", **FREE)


async def anthropic_agent(session: Any, task: AgentTask) -> None:
    tools = tools_for("anthropic", task)
    async with session.anthropic() as client:
        talk = client.messages
        messages: list[Any] = [{"role": "user", "content": session.environment.observation}]
        for _ in range(2):
            reply = await talk.create(system="Be brief.", messages=messages, **FREE)
            edited = [*messages, {"role": "assistant", "content": "Something else."}]
            await talk.create(system="Be brief.", messages=[*edited, {"role": "user", "content": "Really?"}], **FREE)
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "And then?"}]
        helped = await talk.create(system="You help.", messages=[{"role": "user", "content": "What is a sum?"}], **FREE)
        assert helped.content
        choice = {"type": "tool", "name": "play", "disable_parallel_tool_use": True}
        asked = {"model": "policy", "max_tokens": 2000, "tools": tools}
        messages = [{"role": "user", "content": "Play."}]
        called = await talk.create(messages=messages, tool_choice=choice, **asked)
        use = next(block for block in called.content if block.type == "tool_use")
        result, _ = await session.environment.step(use.input["move"])
        messages += [
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": result}]},
        ]
        await talk.create(messages=messages, tools=tools, tool_choice={"type": "none"}, **FREE)


@pytest.mark.parametrize(("agent", "branches"), [(openai_agent, 6), (anthropic_agent, 5)])
@pytest.mark.parametrize("name", ["qwen3", "magistral"])
def test_each_branch_is_exact(serve: Callable[[str], Served], name: str, agent: Any, branches: int) -> None:
    served = serve(name)
    bias = thought_bias(served)
    run = run_agents(
        agent,
        [SUM],
        servers=[served.server],
        environment=environment,
        retries=0,
        sampling_params=as_params(bias),
    )
    (episode,) = run.episodes
    assert episode.reason == "done", episode.error
    assert sum(branch.sampled_tokens for branch in run.trajectories) == episode.tokens
    assert check(served, run, bias) == episode.tokens
    assert len(run.trajectories) == branches
