"""Tasks of the package `reasoning-gym` by name, one question an episode."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.rollout.environments.games import ReasoningGym
from verl_server.rollout.environments.text import WithoutTools


class ReasoningGymEnvironment(WithoutTools):
    """A `TextEnvironment`: the observation is the question, the reward the task's score of the answer."""

    def __init__(self, name: str, **options: Any) -> None:
        """`options` are `attempts` and options of the task, such as `min_digits`. Needs the extra `games`."""
        self._game = ReasoningGym(name, **options)

    async def reset(self, seed: int | None) -> str:
        observation = await asyncio.to_thread(self._game.reset, seed)
        return str(observation["text"])

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        observation, reward, done = await asyncio.to_thread(self._game.step, {"text": text})
        return str(observation["text"]), reward, done


def check_reasoning_gym(name: str) -> None:
    """Raise BadRequestError if the package, or a task of this name, does not exist."""
    ReasoningGym(name)  # names the extra if the package is missing
    names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if name not in names:
        raise BadRequestError(f"reasoning-gym has no task {name!r}. Its tasks: {', '.join(names)}.")
