"""`EnvPool`: create the environments of an environment server, and bound how many exist at one time.

The connections of `env_server` and the sessions of `env_mcp` take their environments from one pool.
"""

from __future__ import annotations

from verl_server.rollout.environments.action_schema import ActionSchema
from verl_server.rollout.environments.env_factory import EnvFactory
from verl_server.rollout.environments.hosted_env import EnvMessageError, HostedEnv


class EnvPool:
    """Room for `max_concurrent_envs` environments. `action_schema` is None if the environment declares none."""

    def __init__(self, factory: EnvFactory, action_schema: ActionSchema | None, max_concurrent_envs: int) -> None:
        self.factory = factory
        self.action_schema = action_schema
        self.max_concurrent_envs = max_concurrent_envs
        self.concurrent_envs = 0

    def open(self) -> HostedEnv:
        """Create an environment, which counts until `close`.

        Raise EnvMessageError CAPACITY_REACHED if the pool has `max_concurrent_envs` environments already.
        """
        if self.concurrent_envs >= self.max_concurrent_envs:
            raise EnvMessageError("CAPACITY_REACHED", f"All {self.max_concurrent_envs} environments are taken.")
        self.concurrent_envs += 1
        return HostedEnv(self.factory, self.action_schema)

    async def close(self, hosted: HostedEnv) -> None:
        """Close an environment that `open` returned, and free its room. Call it once for each environment."""
        try:
            await hosted.close()
        finally:
            self.concurrent_envs -= 1
