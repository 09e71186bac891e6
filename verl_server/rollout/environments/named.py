"""Environments by name, as the command line writes them: `reasoning-gym:NAME`, `textarena:NAME`, or an OpenEnv URL."""

from __future__ import annotations

from verl_server.errors import BadRequestError
from verl_server.rollout.environments.openenv import OpenEnvEnvironment
from verl_server.rollout.environments.reasoning_gym import ReasoningGymEnvironment, check_reasoning_gym
from verl_server.rollout.environments.text import MakeEnvironment
from verl_server.rollout.environments.textarena import TextArenaEnvironment, check_textarena

_FAMILIES = ("reasoning-gym:", "textarena:")


def is_named(text: str) -> bool:
    """True if the text names an environment of a package, in place of a file."""
    return text.startswith(_FAMILIES)


def environment_named(text: str) -> MakeEnvironment:
    """Return the factory. Raises BadRequestError if the package, or the name in it, does not exist."""
    family, _, name = text.partition(":")
    if is_named(text) and not name:
        raise BadRequestError(f"{text!r} has no name behind the colon, such as reasoning-gym:chain_sum.")
    if family == "reasoning-gym":
        check_reasoning_gym(name)
        return lambda options: ReasoningGymEnvironment(name, **options)
    if family == "textarena":
        check_textarena(name)
        return lambda options: TextArenaEnvironment(name, **options)
    if "://" in text:
        return lambda options: OpenEnvEnvironment(text, **options)
    raise BadRequestError(f"{text!r} is no environment: write reasoning-gym:NAME, textarena:NAME or http://HOST:PORT.")
