"""`TextEnvironment`: the environment of an agent, in text and tool calls.

`rollout.agents` plays it for one episode and keeps its rewards from the agent. The other modules of this folder
implement it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from verl_server.errors import BadRequestError


class TextEnvironment(Protocol):
    """An environment whose observations and actions are text: what the `environment` of `run_agents` returns.

    It plays one episode at a time. It raises `rollout.environment.EnvError` for its own faults.
    """

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools in the shape of OpenAI's `tools`. [] for a plain text game."""

    async def reset(self, seed: int | None) -> str:
        """Start the episode and return its first observation."""

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        """Play the policy's text. Return (observation, reward or None, done)."""

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text."""

    async def close(self) -> None:
        """Free what the environment holds. It may be called twice."""


class WithoutTools:
    """The part of a `TextEnvironment` that is the same for all games without tools."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        return []

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise BadRequestError("This environment has no tools: play it with step(text).")

    async def close(self) -> None:
        return


MakeEnvironment = Callable[[dict[str, Any]], TextEnvironment]
"""A function that makes an environment for one episode. Its argument has the task's own environment options."""
