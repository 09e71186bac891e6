"""`check_environment`: one reset before a run begins, so that a wrong URL is reported at once.

The trainer calls it before it loads the model, and `verl-server rollout` before it writes.
"""

from __future__ import annotations

import asyncio

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.rollout.environment import EnvError, EnvTimeouts, RemoteEnvironment
from verl_server.rollout.renderer import Renderer
from verl_server.rollout.running_loop import refuse_running_loop


def check_environment(
    url: str,
    renderer: Renderer | None,
    timeouts: EnvTimeouts,
    *,
    option: str = "--env-url",
    bounds: str = "--env.connect or --env.reset",
) -> None:
    """Reset one session at `url` and render its first observation, unless an agent reads it (no renderer).

    `option` and `bounds` are the options of the URL and of the timeouts, which errors name.
    Raise BadRequestError that names the remedy.
    """
    refuse_running_loop("check_environment", "Call it in another thread: `await asyncio.to_thread(...)`.")
    asyncio.run(_check(url, renderer, timeouts, option, bounds))


async def _check(url: str, renderer: Renderer | None, timeouts: EnvTimeouts, option: str, bounds: str) -> None:
    try:
        environment = RemoteEnvironment(url, timeouts, is_patient=False)  # a wrong URL is refused, too
    except BadRequestError as error:
        raise BadRequestError(f"{option}: {error}") from None
    async with environment:
        try:
            result = await environment.reset(0, episode_id="check")
        except EnvError as error:
            reason = str(error).rstrip(".")
            raise BadRequestError(
                f"The environment at {option} {url} cannot be played: {reason}. Start the environment server, or "
                f"correct the URL. If the server is only slow, raise {bounds}."
            ) from error
    if renderer is None:
        return
    try:
        renderer.observation_tokens(result.observation, None)
    except VerlServerError as error:
        raise BadRequestError(
            f"The first observation of the environment at {option} {url} cannot be rendered: {error}"
        ) from error
