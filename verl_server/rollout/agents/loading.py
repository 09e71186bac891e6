"""Loads the agents, rewards, environments and tasks that a command line names.

`verl-server rollout --agent` and the trainer's groups of agents call these functions before a run begins. If a name
cannot be resolved, they raise BadRequestError, which names the option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.files.json_files import convert, numbered_lines, parse_json
from verl_server.rollout.agents.rewards import Reward
from verl_server.rollout.agents.tool_loop import DEFAULT_MAX_TURNS, ToolLoop
from verl_server.rollout.agents.types import AgentFunction, AgentTask, EnvironmentFactory
from verl_server.rollout.environments.env_factory import load_function
from verl_server.rollout.environments.named import command_words, environment_named

_FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_]\w*")


def load_agent(
    text: str, tools: Sequence[str] = (), system: str | None = None, max_turns: int | None = None
) -> AgentFunction | list[str]:
    """Return the agent that `text` names: a function, the tool loop, or a command as a list of words.

    The other arguments are options of the tool loop. Raise BadRequestError if the text or another argument is wrong.
    """
    if text == "tools":
        functions = [load_function(tool, "tool") for tool in tools]
        return ToolLoop(functions, system=system, max_turns=max_turns or DEFAULT_MAX_TURNS)
    if tools or system is not None:
        raise BadRequestError("--tool and --system are for --agent tools.")
    if _FUNCTION.fullmatch(text):
        return load_function(text, "agent")
    words = command_words(text, "--agent")
    if not words:
        raise BadRequestError("--agent is empty. Name MODULE:function, or a command in quotes.")
    return words


def environment_factory(name: str) -> EnvironmentFactory:
    """Return the factory of a named environment, which takes each task's own options."""
    make = environment_named(name)
    return lambda task: make(task.environment)


def load_reward(text: str | None, agent: Any, environment: EnvironmentFactory | None) -> Reward:
    """Return the reward that `--reward` names. The default is the environment's reward, or the exit of a program."""
    if text is None:
        if environment is None and callable(agent):
            raise BadRequestError("--reward is needed: MODULE:function, because there is no environment.")
        return "exit" if environment is None else "environment"
    if text == "exit":
        return "exit"
    if text == "environment":
        return "environment"
    return load_function(text, "reward")


def read_tasks(path: Path, option: str = "--tasks") -> list[AgentTask]:
    """Return one task for each line of a JSONL file, which `option` names.

    Raise BadRequestError if a line is no task, or there is none.
    """
    try:
        tasks = [_task(line, where, i) for i, (where, line) in enumerate(numbered_lines(path)) if line.strip()]
    except BadRequestError as error:
        named = ", reasoning-gym:NAME or textarena:NAME" if option == "--tasks" else ""
        raise BadRequestError(f"{error}. {option} is FILE.jsonl with one task a line{named}.") from None
    if not tasks:
        raise BadRequestError(f"{path} has no tasks.")
    return tasks


def _task(line: bytes, where: str, seed: int) -> AgentTask:
    """Return the task of a line. If the line is only an input, `seed` is the task's seed."""
    content = parse_json(line, where)
    is_task = isinstance(content, dict) and bool(content) and content.keys() <= {"seed", "input", "environment"}
    return convert(content, AgentTask, where) if is_task else AgentTask(seed=seed, input=content)
