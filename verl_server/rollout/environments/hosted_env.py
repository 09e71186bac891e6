"""`HostedEnv`: one environment inside the environment server, which calls it and checks what it returns.

Each connection of `env_server` owns one. `async` methods run on the event loop. Plain methods run in a thread that
belongs to the environment, because some libraries work only in the thread that created their objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_server.rollout.environments.action_schema import ActionSchema
from verl_server.rollout.environments.env_factory import EnvFactory, accepted, missing_method

_CLOSE_TIMEOUT = 10.0
"""Seconds for an environment's `close`, which may have to wait for a step that hangs."""

RESET_RETURNS = "the observation (a dict or a string), or Gymnasium's (observation, info)"
STEP_RETURNS = "(observation, reward, done), or Gymnasium's (observation, reward, terminated, truncated, info)"


class EnvMessageError(Exception):
    """An error that the client receives as an `error` message of OpenEnv's protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class HostedEnv:
    """One environment, created by the first call that needs it. Its own exceptions pass through every method.

    As in OpenEnv's server, calls may come in any order: the environment decides what a `step` before a `reset` does.
    """

    def __init__(self, factory: EnvFactory, action_schema: ActionSchema | None) -> None:
        self._factory = factory
        self._action_schema = action_schema
        self._environment: Any = None
        self._has_episode = False
        self._thread: ThreadPoolExecutor | None = None

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Start an episode. `reset` is called with the entries of `data` that it takes as keyword arguments."""
        reset = (await self._created()).reset
        observation = reset_observation(await self._call(reset, **accepted(reset, data)), self._name("reset"))
        self._has_episode = True
        return {"observation": observation, "reward": None, "done": False}

    async def begin(self) -> None:
        """Start an episode, unless one was started before: a client of tools need not call `reset`."""
        if not self._has_episode:
            await self.reset({})

    async def invoke(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method of the environment that `begin` or `reset` has started, and return what it returns."""
        return await self._call(getattr(self._environment, method), **arguments)

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Play an action. Raise EnvMessageError, without a call to `step`, if the action violates the schema."""
        violation = self._action_schema.violation(action) if self._action_schema is not None else None
        if violation is not None:
            raise EnvMessageError("VALIDATION_ERROR", violation)
        step = (await self._created()).step
        try:
            returned = await self._call(step, action)
        except Exception as error:
            if self._has_episode:
                raise
            text = f"{type(error).__name__}: {error} (a step before reset, for which this environment may not be made)"
            raise EnvMessageError("EXECUTION_ERROR", text) from error
        self._has_episode = True
        observation, reward, done = step_result(returned, self._name("step"))
        return {"observation": observation, "reward": reward, "done": done}

    async def state(self) -> dict[str, Any]:
        """Return the environment's `state` property, {} if it has none."""
        state = getattr(await self._created(), "state", None)
        if state is not None and not isinstance(state, Mapping):
            raise _bad_return(self._name("state"), "be a property that is a dict", state)
        return dict(state or {})

    async def close(self) -> None:
        """Call the environment's `close`, with a bound. A plain method that hangs keeps its thread until it returns."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._call(close), _CLOSE_TIMEOUT)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _created(self) -> Any:
        if self._environment is None:
            self._environment = await self._make()
        return self._environment

    async def _make(self) -> Any:
        is_async = inspect.iscoroutinefunction(getattr(self._factory, "reset", None))
        environment = self._factory() if is_async else await self._call(self._factory)
        missing = missing_method(environment)
        if missing is not None:
            factory = getattr(self._factory, "__qualname__", repr(self._factory))
            raise EnvMessageError(
                "EXECUTION_ERROR",
                f"{factory}() returned {_described(environment)}, which is no environment: it has no method {missing}.",
            )
        return environment

    def _name(self, method: str) -> str:
        return f"{type(self._environment).__qualname__}.{method}"

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "environment")
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))
        return await returned if inspect.isawaitable(returned) else returned


# -- return values -------------------------------------------------------------------------


def reset_observation(returned: Any, method: str) -> dict[str, Any]:
    """Return the observation from `returned`, which is an observation or (observation, info).

    `method` is the name of the method in error messages.
    """
    match returned:
        case (observation, dict()):
            pass
        case dict() | str():
            observation = returned
        case _:
            raise _bad_return(method, f"return {RESET_RETURNS}", returned)
    return _observation(observation, method)


def step_result(returned: Any, method: str) -> tuple[dict[str, Any], float | None, bool]:
    """Return (observation, reward, done) from `returned`, in either of the two forms. `method` is for messages.

    An episode that Gymnasium calls truncated is done. `info` is dropped: OpenEnv's protocol has no field for it.
    """
    match returned:
        case (observation, reward, done):
            return _observation(observation, method), _reward(reward, method), _flag(done, "done", method)
        case (observation, reward, terminated, truncated, dict()):
            ended = [_flag(terminated, "terminated", method), _flag(truncated, "truncated", method)]
            return _observation(observation, method), _reward(reward, method), any(ended)
        case _:
            raise _bad_return(method, f"return {STEP_RETURNS}", returned)


def _observation(value: Any, method: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise _bad_return(method, "return an observation that is a dict or a string", value)
    return value


def _reward(value: Any, method: str) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # NumPy and torch raise these for arrays of many elements
        number = math.nan
    if not math.isfinite(number):
        raise _bad_return(method, "return a reward that is a finite number, or None for no reward", value)
    return number


def _flag(value: Any, name: str, method: str) -> bool:
    flag = value
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):
            flag = value.item()  # NumPy's own True and False
    if not (isinstance(flag, int) and flag in (0, 1)):
        raise _bad_return(method, f"return `{name}` as True or False", value)
    return bool(flag)


def _bad_return(method: str, should: str, returned: Any) -> EnvMessageError:
    return EnvMessageError("EXECUTION_ERROR", f"{method} must {should}. It returned {_described(returned)}.")


def _described(value: Any) -> str:
    length = f" with {len(value)} entries" if isinstance(value, tuple | list) else ""
    return f"an object of type {type(value).__name__}{length}: {reprlib.repr(value)}"
