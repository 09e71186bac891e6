"""Agents of unmodified SDKs play games through sessions, and the export is what was sampled.

The agents are the examples of `examples/`, as functions and as programs. Each log-probability is computed again with
transformers in float32. Weights are pushed between two turns and in the middle of one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Served
from families import FAMILIES

from verl_server.chat.output import OutputFormat
from verl_server.chat.tool_grammar import forced_call_grammar
from verl_server.chat.tools import ToolChoice, read_tools
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentRun, AgentTask
from verl_server.rollout.env_factory import load_function
from verl_server.rollout.environments.named import environment_named
from verl_server.rollout.environments.text import TextEnvironment

EXAMPLES = Path(__file__).parents[2] / "examples"
GUESS = AgentTask(
    seed=3,
    input={"pattern": r"^\[([1-9]|1[0-9]|20)\]$"},
    environment={"name": "textarena:GuessTheNumber-v0"},
)
SUM = AgentTask(seed=5, input={"pattern": r"^-?[0-9]{1,3}$"}, environment={"name": "reasoning-gym:chain_sum"})
AGENTS = ("openai function", "openai program", "anthropic function", "anthropic program")


def agent_named(name: str) -> Any:
    sdk, _, kind = name.partition(" ")
    file = EXAMPLES / f"{sdk}_agent.py"
    return load_function(f"{file}:play", "agent") if kind == "function" else [sys.executable, str(file)]


def environment(task: AgentTask) -> TextEnvironment:
    return environment_named(task.environment["name"])({})


def grammar_of(served: Served, task: AgentTask) -> str:
    """Return the grammar of a forced call of the agents' tool."""
    (tool,) = load_function(f"{EXAMPLES / 'openai_agent.py'}:tools_for", "tools")(task.input)
    tokenizer = served.family.tokenizer
    format = OutputFormat.of(tokenizer.chat_template)
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    tags = {tag: added[tag] for tag in format.tags(tools=True) if tag in added}
    return forced_call_grammar(
        read_tools([tool]), ToolChoice("required"), format, parallel=False, special_tokens=tags
    )


def thought_bias(served: Served) -> dict[int, float]:
    """Return a bias that ends the reasoning of a random policy after some tokens."""
    format = OutputFormat.of(served.family.tokenizer.chat_template).reasoning_format
    if format is None:
        return {}
    return {served.family.tokenizer.convert_tokens_to_ids(format.close): 9.0}


def check(served: Served, run: AgentRun, bias: dict[int, float]) -> int:
    """Recompute all branches of a run. Return the number of sampled tokens."""
    tasks = {episode.index: episode.task for episode in run.episodes}
    return sum(
        served.recomputation.check(branch, bias, grammar_of(served, tasks[branch.task.group]))
        for branch in run.trajectories
    )


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_agent_plays_and_its_export_is_exact(serve: Callable[[str], Served], name: str, agent: str) -> None:
    served = serve(name)
    bias = thought_bias(served)
    run = run_agents(
        agent_named(agent),
        [GUESS, SUM],
        servers=[served.server],
        environment=environment,
        group_size=2,
        retries=0,
        sampling_params={"logit_bias": {str(token): value for token, value in bias.items()}},
    )
    for episode in run.episodes:
        assert episode.reason == "done", f"{episode.error}: {episode.output}"
    assert len(run.trajectories) == 4, "one branch for each episode"
    guesses = [branch for branch in run.trajectories if branch.task.group == 0]
    assert max(len(branch.turns) for branch in guesses) > 2
    assert all(turn.action and len(turn.action["calls"]) == 1 for branch in guesses for turn in branch.turns)
    assert check(served, run, bias) > 100
