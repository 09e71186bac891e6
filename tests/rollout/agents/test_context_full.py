"""A conversation that outgrows its context ends as `context_full`, at once and with its reward, whoever holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.agents.common import FAST, Echo, program
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.tool_loop import ToolLoop
from verl_server.rollout.agents.types import AgentEpisode, AgentLimits, AgentSession, AgentTask, Server
from verl_server.rollout.trajectory import StopReason

CONTEXT = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")
    small: dict[str, Any] = {"kv_cache_gib": 0.1, "cpu_threads": 1, "cpu_kernel_choice": "torch", "port": 0}
    with HttpServerEngineAdapter(model_path=str(folder), api_key="owner", context_length=CONTEXT, **small) as engine:
        assert engine.url is not None
        yield Server(engine.url, "owner")


class Endless(Echo):
    """Its observations have no end."""

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        return "go on " * 8, None, False


async def openai_agent(session: AgentSession, task: AgentTask) -> None:
    messages: list[Any] = [{"role": "user", "content": task.input}]
    async with session.openai() as client:
        while True:
            reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, messages[0]]


async def messages_agent(session: AgentSession, task: AgentTask) -> None:
    """Speaks Anthropic's API."""
    messages: list[Any] = [{"role": "user", "content": task.input}]
    async with session.http(base_url=session.anthropic_base_url) as client:
        while True:
            answer = await client.post("/v1/messages", json={"messages": messages, "max_tokens": 8})
            answer.raise_for_status()
            messages += [{"role": "assistant", "content": answer.json()["content"]}, messages[0]]


async def ids_agent(session: AgentSession, task: AgentTask) -> None:
    """Sends token ids to SGLang's route."""
    ids = [5] * 8
    async with session.http(base_url=session.anthropic_base_url) as client:
        while True:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8}}
            answer = await client.post("/generate", json=body)
            answer.raise_for_status()
            ids = ids + answer.json()["output_ids"] + [5] * 8


PROGRAM = program(
    """
messages = [{"role": "user", "content": "begin"}]
while True:
    body = {"model": "m", "messages": messages, "max_tokens": 8}
    reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "go on"}]
"""
)
AGENTS: dict[str, Any] = {
    "tool loop": ToolLoop(max_turns=100, request={"regex": "go on"}),  # without max_tokens, and it ends each reply
    "openai": openai_agent,
    "anthropic": messages_agent,
    "token ids": ids_agent,
    "program": PROGRAM,
}


def play(agent: Any, server: Server, out: Path, text: str = "begin", **options: Any) -> AgentEpisode:
    run = run_agents(agent, [AgentTask(input=text)], servers=[server], reward=lambda e: 1.0, out=out, **options)
    (episode,) = run.episodes  # one attempt
    assert (episode.reason, episode.reward) == (StopReason.CONTEXT_FULL, 1.0), episode.error
    return episode


@pytest.mark.parametrize("max_context", [None, 160])
@pytest.mark.parametrize("name", AGENTS)
def test_a_conversation_that_outgrows_its_context(
    server: Server, tmp_path: Path, name: str, max_context: int | None
) -> None:
    options: dict[str, Any] = {"limits": AgentLimits(max_context=max_context)}
    if name == "tool loop":
        options |= {"environment": lambda task: Endless()}
    episode = play(AGENTS[name], server, tmp_path, **options)
    assert episode.turns > 1
    assert episode.trajectory is not None
    longest = max(len(branch.ids) for branch in episode.trajectory.branches)
    assert longest <= (max_context or CONTEXT)


def test_a_reply_that_fills_the_context(server: Server, tmp_path: Path) -> None:
    """Without `max_tokens`, a model that does not stop samples to the end of the context."""
    loop = ToolLoop(request={"ignore_eos": True})
    episode = play(loop, server, tmp_path, limits=FAST)
    assert (episode.turns, episode.is_unsampled) == (1, False)


def test_a_first_prompt_that_does_not_fit(server: Server, tmp_path: Path) -> None:
    episode = play(ToolLoop(), server, tmp_path, text="a" * 2 * CONTEXT, limits=FAST)
    assert (episode.turns, episode.is_unsampled) == (0, True)
    assert "prompt is too long: " in (episode.error or "")
