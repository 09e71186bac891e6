"""Environments by name, as the command line writes them.

`reasoning-gym:NAME`, `textarena:NAME`, the URL of an OpenEnv server, `mcp:URL` or `mcp:COMMAND` (tools of an MCP
server), `code` (the isolated tool run_python), and `workspace` (a folder for an installed agent, and a check).
`verifiers:NAME` names tasks whose own code plays them
(`agents/verifiers_agent`).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.rollout.environments import verifiers
from verl_server.rollout.environments.code_tool import CodeTool
from verl_server.rollout.environments.isolation import Isolation, check_isolation
from verl_server.rollout.environments.mcp_tools import McpTools
from verl_server.rollout.environments.openenv import OpenEnvEnvironment
from verl_server.rollout.environments.reasoning_gym import ReasoningGymEnvironment, check_reasoning_gym
from verl_server.rollout.environments.text import MakeEnvironment
from verl_server.rollout.environments.textarena import TextArenaEnvironment, check_textarena
from verl_server.rollout.environments.workspace import WorkspaceEnvironment, check_slots
from verl_server.rollout.environments.workspace_task import read_workspace

logger = logging.getLogger(__name__)

_FAMILIES = ("reasoning-gym:", "textarena:", verifiers.FAMILY)


def command_words(text: str, setting: str) -> list[str]:
    """Return the words of a command, as a shell splits them. Raise BadRequestError, which names `setting`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadRequestError(f"{setting}: {text!r:.200} is not a command: {error}. Close each quote.") from None


def is_named(text: str) -> bool:
    """Return True if the text names an environment of a package, in place of a file."""
    return text.startswith(_FAMILIES)


def is_url(text: str) -> bool:
    """Return True if the text is the URL of an environment server (OpenEnv's protocol)."""
    return "://" in text and not text.startswith(("mcp:", *_FAMILIES))


def has_reward(text: str) -> bool:
    """Return False if the named environment has tools only, so that a run needs a reward function."""
    return text != "code" and not text.startswith("mcp:")


def check_options(text: str, options: Mapping[str, Any]) -> None:
    """Raise BadRequestError if a task's options for the named environment are wrong, as far as that can be known."""
    if text == "workspace":
        read_workspace(options)


def environment_named(text: str, isolation: Isolation = "bubblewrap") -> MakeEnvironment:
    """Return the factory of an environment.

    `isolation` is that of the checks of `workspace`. Raise BadRequestError if the package, or the name in it, does not
    exist, or if this machine cannot isolate what the environment runs.
    """
    if verifiers.is_verifiers(text):
        raise BadRequestError(f"{text!r} is played by its own code: name it with --tasks, and no --agent.")
    family, _, name = text.partition(":")
    if is_named(text) and not name:
        raise BadRequestError(f"{text!r} has no name behind the colon, such as reasoning-gym:chain_sum.")
    if family == "reasoning-gym":
        check_reasoning_gym(name)
        return lambda options: ReasoningGymEnvironment(name, **options)
    if family == "textarena":
        check_textarena(name)
        return lambda options: TextArenaEnvironment(name, **options)
    if family == "mcp":
        server = name if "://" in name else command_words(name, "mcp:COMMAND")
        if not server:
            raise BadRequestError(
                "mcp: has no server behind the colon, such as mcp:http://HOST/mcp or 'mcp:python x.py'."
            )
        McpTools(server)  # names a missing package before the first episode
        return lambda options: McpTools(server, **options)
    if text == "code":
        check_isolation("bubblewrap")
        return lambda options: CodeTool(**options)
    if text == "workspace":
        check_isolation(isolation)
        if isolation == "none":
            logger.warning(
                "The checks of the workspaces run without isolation: code that the policy wrote can read, change and "
                "send all that this user can. --isolation bubblewrap keeps it apart."
            )
        slots = check_slots()
        return lambda options: WorkspaceEnvironment(options, isolation=isolation, slots=slots)
    if is_url(text):
        return lambda options: OpenEnvEnvironment(text, **options)
    raise BadRequestError(
        f"{text!r} is no environment: write reasoning-gym:NAME, textarena:NAME, http://HOST:PORT (OpenEnv), mcp:URL, "
        "'mcp:COMMAND', code or workspace."
    )
