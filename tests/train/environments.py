"""Environments that fail, or wait, for chosen seeds. The `EnvServer` of the trainer's tests loads them by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from verl_server.rollout.environments.games import GuessNumber


class FailingGame(GuessNumber):
    """The number-guessing game, in which episodes with some seeds fail or all end with the same reward."""

    def __init__(self, failing: list[int], equal: list[int] | None = None, **game: Any) -> None:
        """Take the seeds whose episodes fail (`failing`) and those whose rewards are all equal (`equal`)."""
        super().__init__(**game)
        self._failing, self._equal = set(failing), set(equal or ())

    async def reset(self, seed: int | None = None, episode_id: str | None = None) -> dict[str, Any]:
        if seed in self._failing:
            raise RuntimeError("the sandbox is down")
        self._is_equal = seed in self._equal
        return await super().reset(seed, episode_id)

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        observation, reward, done = await super().step(action)
        return observation, 1.0 if done and self._is_equal else reward, done


class HeldGame(GuessNumber):
    """The number-guessing game, in which episodes with some seeds wait in one of their steps until a file exists."""

    def __init__(self, held: list[int], gate: str, after: int = 0, **game: Any) -> None:
        """`held`: the seeds. `gate`: path of the file. `after`: number of steps that do not wait."""
        super().__init__(**game)
        self._held, self._gate, self._after = set(held), Path(gate), after
        self._is_held, self._steps = False, 0

    async def reset(self, seed: int | None = None, episode_id: str | None = None) -> dict[str, Any]:
        self._is_held, self._steps = seed in self._held, 0
        return await super().reset(seed, episode_id)

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        while self._is_held and self._steps >= self._after and not self._gate.exists():
            await asyncio.sleep(0.02)
        self._steps += 1
        return await super().step(action)
