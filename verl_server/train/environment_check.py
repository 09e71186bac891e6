"""`check_environment`: one reset before the model is loaded, so that a wrong URL is reported at once."""

from __future__ import annotations

import asyncio

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.rollout.environment import EnvError, EnvTimeouts, RemoteEnvironment
from verl_server.rollout.renderer import Renderer
from verl_server.rollout.running_loop import refuse_running_loop


def check_environment(url: str, renderer: Renderer | None, timeouts: EnvTimeouts) -> None:
    """Reset one session at `url` and render its first observation, unless an agent reads it (no renderer).

    Raises BadRequestError that names the remedy.
    """
    refuse_running_loop("check_environment", "Call it in another thread: `await asyncio.to_thread(...)`.")
    asyncio.run(_check(url, renderer, timeouts))


async def _check(url: str, renderer: Renderer | None, timeouts: EnvTimeouts) -> None:
    async with RemoteEnvironment(url, timeouts) as environment:
        try:
            result = await environment.reset(0, episode_id="check")
        except EnvError as error:
            raise BadRequestError(
                f"The environment at --env-url {url} cannot be played: {error} Start the environment server, or "
                "correct the URL. If the server is only slow, raise --env.connect or --env.reset."
            ) from error
    if renderer is None:
        return
    try:
        renderer.observation_tokens(result.observation, None)
    except VerlServerError as error:
        raise BadRequestError(
            f"The first observation of the environment at --env-url {url} cannot be rendered: {error}"
        ) from error
