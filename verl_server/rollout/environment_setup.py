"""`EnvironmentSetup`: what an `AgentLoop` needs to play an environment. A loop with several has one for each name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_server.rollout.environment import EnvTimeouts, RemoteEnvironment
from verl_server.rollout.episode import EnvClient, Limits
from verl_server.rollout.renderer import Renderer


@dataclass(frozen=True)
class EnvironmentSetup:
    environment: str | Callable[[], EnvClient]
    """URL of an environment server, or a function that returns the client of one environment."""
    renderer: Renderer
    """Makes tokens of its observations, and actions of what was sampled."""
    limits: Limits
    """Bounds of its episodes. Those of a whole batch are `AgentLoop.limits`."""

    @property
    def url(self) -> str:
        """URL of the environment server; the name of the callable where environments are made by one."""
        return self.environment if isinstance(self.environment, str) else repr(self.environment)

    def client(self, timeouts: EnvTimeouts) -> EnvClient:
        """Return the client of one environment."""
        if isinstance(self.environment, str):
            return RemoteEnvironment(self.environment, timeouts)
        return self.environment()
