"""An environment behind an OpenEnv server, as text: `RemoteEnvironment` with one key for observations and actions."""

from __future__ import annotations

from typing import Any

from verl_server.files.json_values import dumps
from verl_server.rollout.environment import EnvError, EnvTimeouts, RemoteEnvironment
from verl_server.rollout.environments.text import WithoutTools


class OpenEnvEnvironment(WithoutTools):
    """A `TextEnvironment`. An observation without the text's key is shown as JSON."""

    def __init__(
        self,
        url: str,
        *,
        observation_key: str = "text",
        action_key: str = "text",
        timeouts: EnvTimeouts | None = None,
        **options: Any,
    ) -> None:
        """`options` are passed to the environment's `reset`."""
        self._remote = RemoteEnvironment(url, timeouts)
        self._observation_key = observation_key
        self._action_key = action_key
        self._options = options

    async def reset(self, seed: int | None) -> str:
        result = await self._remote.reset(seed, **self._options)
        if result.done:
            raise EnvError("The environment was done before the first turn.")
        return self._text(result.observation)

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        result = await self._remote.step({self._action_key: text})
        return self._text(result.observation), result.reward, result.done

    async def close(self) -> None:
        await self._remote.close()

    def _text(self, observation: dict[str, Any]) -> str:
        value = observation.get(self._observation_key)
        return value if isinstance(value, str) else dumps(observation).decode()
