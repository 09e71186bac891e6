"""The agents of `examples/`, their tasks, and the check of what a run exported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from conftest import Served

from verl_server.chat.formats import ReasoningFormat
from verl_server.chat.output import OutputFormat
from verl_server.chat.tool_grammar import output_grammar
from verl_server.chat.tools import ToolChoice, read_tools
from verl_server.rollout.agents.types import AgentRun, AgentTask
from verl_server.rollout.environments.env_factory import load_function
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
    """Return an example as `run_agents` takes it."""
    sdk, _, kind = name.partition(" ")
    file = EXAMPLES / f"{sdk}_agent.py"
    return load_function(f"{file}:play", "agent") if kind == "function" else [sys.executable, str(file)]


def tools_for(sdk: str, task: AgentTask) -> Any:
    """Return the tools of an example."""
    return load_function(f"{EXAMPLES / sdk}_agent.py:tools_for", "tools")(task.input)


def environment(task: AgentTask) -> TextEnvironment:
    return environment_named(task.environment["name"])({})


def reasoning_of(served: Served) -> ReasoningFormat | None:
    return OutputFormat.of(served.family.tokenizer.chat_template).reasoning_format


def thought_bias(served: Served) -> dict[int, float]:
    """Return a bias with which a random policy ends its reasoning after some tokens."""
    format = reasoning_of(served)
    return {} if format is None else {served.family.token_id(format.close): 9.0}


def as_params(bias: dict[int, float]) -> dict[str, Any]:
    """Return the sampling parameters with a bias."""
    return {"logit_bias": {str(token): value for token, value in bias.items()}}


def grammar_of(served: Served, task: AgentTask) -> str:
    """Return the grammar of a forced call of the agents' tool."""
    tools = tools_for("openai", task)
    tokenizer = served.family.tokenizer
    format = OutputFormat.of(tokenizer.chat_template)
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    tags = {tag: added[tag] for tag in format.tags(tools=True) if tag in added}
    grammar = output_grammar(read_tools(tools), ToolChoice("required"), format, parallel=False, special_tokens=tags)
    assert grammar is not None
    return grammar


def check(served: Served, run: AgentRun, bias: dict[int, float]) -> int:
    """Recompute all branches of a run in which each turn is a forced call. Return the number of sampled tokens."""
    tasks = {episode.index: episode.task for episode in run.episodes}
    return sum(
        served.recomputation.check(branch, bias, grammar_of(served, tasks[branch.task.group]))
        for branch in run.trajectories
    )
