"""Loads the agents, recipes, rewards, environments and tasks that a command line names.

`verl-server rollout --agent` and the trainer's groups of agents call these functions before a run begins. If a name
cannot be resolved, they raise BadRequestError, which names the option.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from verl_server.errors import BadRequestError
from verl_server.files.json_files import convert, numbered_lines, parse_json
from verl_server.files.run_output import location
from verl_server.rollout.agents import recipes
from verl_server.rollout.agents.episode import Agent
from verl_server.rollout.agents.installed import InstalledAgent, ProgramOptions
from verl_server.rollout.agents.recipes.recipe import Recipe
from verl_server.rollout.agents.rewards import Reward
from verl_server.rollout.agents.tool_loop import DEFAULT_MAX_TURNS, ToolLoop
from verl_server.rollout.agents.types import AgentFunction, AgentTask, EnvironmentFactory
from verl_server.rollout.environments.env_factory import load_function, load_module
from verl_server.rollout.environments.isolation import Isolation
from verl_server.rollout.environments.named import (
    check_options,
    command_words,
    environment_named,
    has_reward,
    is_named,
)

_FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_]\w*")
_TASK_KEYS = {"seed", "input", "environment"}


def load_agent(
    text: str,
    tools: Sequence[str] = (),
    system: str | None = None,
    max_turns: int | None = None,
    program: ProgramOptions | None = None,
) -> AgentFunction | list[str] | InstalledAgent:
    """Return the agent that `text` names: a function, the tool loop, a command as a list of words, or a recipe.

    `tools`, `system` and `max_turns` are options of the tool loop, `program` has those of programs. Raise
    BadRequestError if the text or another argument is wrong.
    """
    options = program or ProgramOptions()
    if text == "tools":
        options.check_function()
        functions = [load_function(tool, "tool") for tool in tools]
        return ToolLoop(functions, system=system, max_turns=max_turns or DEFAULT_MAX_TURNS)
    if tools or system is not None:
        raise BadRequestError("--tool and --system are for --agent tools.")
    words = command_words(text, "--agent")
    if not words:
        raise BadRequestError("--agent is empty. Name MODULE:function, a recipe, or a command in quotes.")
    recipe = _recipe(words[0])
    if recipe is not None:
        return options.installed(recipe, location(words[0]), words[1:])
    if _FUNCTION.fullmatch(text):
        options.check_function()
        return load_function(text, "agent")
    options.check_command()
    _check_not_misnamed(words[0])
    return words


def recipe_names() -> list[str]:
    """Return the names of the recipes of this package, sorted."""
    modules = {module.name for module in pkgutil.iter_modules(recipes.__path__)} - {"recipe", "python_script"}
    return sorted(name.replace("_", "-") for name in modules)


def _check_not_misnamed(word: str) -> None:
    """Raise BadRequestError if the program of a command was meant to be a recipe: it would run without isolation."""
    if "/" in word:
        return
    of_program = [name for name in recipe_names() if _own(name).program == word]
    if len(of_program) == 1:  # several have the program `python`, which is also that of many commands
        raise BadRequestError(
            f"{word!r} is the program of the recipe {of_program[0]}: write --agent {of_program[0]}. To run the program "
            f"as a command of your own, name its path, such as {shutil.which(word) or f'./{word}'}."
        )
    if shutil.which(word) is None:
        near = difflib.get_close_matches(word.replace("_", "-"), recipe_names(), 1)
        meant = f"Did you mean --agent {near[0]}? " if near else ""
        raise BadRequestError(
            f"--agent: there is no recipe {word!r}, and no program of this name on PATH. {meant}The recipes are "
            f"{', '.join(recipe_names())}."
        )


def _own(name: str) -> Recipe:
    """Return a recipe of this package."""
    recipe: Recipe = importlib.import_module(f"{recipes.__name__}.{name.replace('-', '_')}").RECIPE
    return recipe


def _recipe(word: str) -> Recipe | None:
    """Return the recipe that a word names, None if it is none of this package and names no `Recipe` of the user."""
    if word in recipe_names():
        return _own(word)
    if not _FUNCTION.fullmatch(word):
        return None
    module, name = load_module(word, "agent", "FUNCTION")
    found = getattr(module, name, None)
    return found if isinstance(found, Recipe) else None


def environment_factory(name: str, isolation: Isolation | None = None) -> EnvironmentFactory:
    """Return the factory of a named environment, which takes each task's own options.

    `isolation` is that of the checks of `workspace`. None: bubblewrap, also for an agent without isolation.
    """
    make = environment_named(name, isolation or "bubblewrap")
    return lambda task: make(task.environment)


def check_playable(agent: Agent, environment: str, reward: str | None) -> None:
    """Raise BadRequestError if an agent cannot play the environment of this name, or if nothing judges it there."""
    if isinstance(agent, InstalledAgent):
        if is_named(environment) and not environment.startswith("reasoning-gym:"):
            raise BadRequestError(
                f"{environment} is a game of several steps, and an installed program gives one answer: name another "
                "environment, or let --agent tools or a program of your own play it."
            )
        if not has_reward(environment):
            raise BadRequestError(
                f"--environment {environment} has tools only, and an installed program has its own: remove the option, "
                "or use --agent tools."
            )
    if reward is None and not has_reward(environment):
        raise BadRequestError(f"--reward is needed: MODULE:function, because {environment} has tools only.")


def load_reward(text: str | None, agent: Agent, environment: EnvironmentFactory | None) -> Reward:
    """Return the reward that `--reward` names. The default is the environment's reward, or the exit of a program."""
    if text is None:
        if environment is None and (callable(agent) or isinstance(agent, InstalledAgent)):
            raise BadRequestError(
                "--reward is needed: MODULE:function, because there is no environment (--environment workspace has "
                "tests of its own)."
            )
        return "exit" if environment is None else "environment"
    if text == "exit":
        return "exit"
    if text == "environment":
        return "environment"
    return load_function(text, "reward")


def read_tasks(path: Path, option: str = "--tasks", environment: str | None = None) -> list[AgentTask]:
    """Return one task for each line of a JSONL file, which `option` names. `environment` names their environment.

    Raise BadRequestError, which names the line, if a line is no task or is wrong for the environment, or if there is
    none.
    """
    try:
        lines = enumerate(numbered_lines(path))
        tasks = [(where, _task(line, where, i)) for i, (where, line) in lines if line.strip()]
    except BadRequestError as error:
        named = ", reasoning-gym:NAME or textarena:NAME" if option == "--tasks" else ""
        raise BadRequestError(f"{error}. {option} is FILE.jsonl with one task a line{named}.") from None
    if not tasks:
        raise BadRequestError(f"{path} has no tasks.")
    if environment is not None:
        for where, task in tasks:
            _check_task(task, where, environment)
    return [task for _, task in tasks]


def _check_task(task: AgentTask, where: str, environment: str) -> None:
    try:
        check_options(environment, task.environment)
    except BadRequestError as error:
        others = sorted(task.input.keys() - _TASK_KEYS) if isinstance(task.input, dict) else []
        hint = f" All of the line is the task's input, because of its key {others[0]!r:.100}." if others else ""
        raise BadRequestError(f"{where}: {error}{hint}") from None


def _task(line: bytes, where: str, seed: int) -> AgentTask:
    """Return the task of a line. If the line is only an input, `seed` is the task's seed."""
    content = parse_json(line, where)
    is_task = isinstance(content, dict) and bool(content) and content.keys() <= _TASK_KEYS
    return convert(content, AgentTask, where) if is_task else AgentTask(seed=seed, input=content)
