"""`HealedServer`: an engine for `AgentLoop` whose episodes continue after a restart of the server.

A server that is started again serves the weights that it loads. So every episode waits until the engine that pushes
weights has pushed them again (`heal`), or until the server's owner has accepted the loaded weights. Then the episode
continues from its own tokens. `close_session` reports to the server, in the background, which episodes have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Any

from verl_server.engine.base import EngineBase
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerRestartedError,
    ServerStoppingError,
    SessionError,
)

logger = logging.getLogger(__name__)

_RETRY_PAUSE = 0.5
"""Seconds before a generation is sent again to a server that answers, but broke its connection."""
_CLOSE_TIMEOUT = 5.0
"""Seconds to wait until the server has noted the end of a session."""
_LAST_CLOSES = 1.0
"""Seconds for which the end of a batch waits until the server has noted the ends of its sessions."""


class HealedServer:
    """A `Generator` for the episodes of one batch. Use it on one event loop, as an asynchronous context manager."""

    def __init__(self, engine: EngineBase, restart_timeout: float) -> None:
        self._engine = engine
        self._restart_timeout = restart_timeout
        self._asking = asyncio.Lock()  # one episode asks the server, and the others read its answer from the engine
        self._closing: set[asyncio.Task[None]] = set()
        self._refuses_closes = False

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        return_logprob: Any = False,
        session_id: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Generate as `EngineBase.async_generate` does. Repeat the call once a failed server is back and healed.

        Raise the last error `restart_timeout` seconds after the first failure. Raise at once if the engine cannot come
        back because it was launched here, or runs in this process.
        """
        engine, deadline = self._engine, None
        while True:
            knew = engine.instance_id if isinstance(engine, HttpServerEngineAdapter) else None
            try:
                return await engine.async_generate(
                    prompt,
                    sampling_params,
                    input_ids,
                    return_logprob=return_logprob,
                    session_id=session_id,
                    timeout=timeout,
                )
            except (ServerRestartedError, ServerDiedError, ServerStoppingError) as error:
                if knew is None or not isinstance(engine, HttpServerEngineAdapter):
                    raise  # it runs in this process, or names no run by which a restart would show
                deadline = deadline or time.monotonic() + self._restart_timeout
                await self._until_healed(engine, knew, deadline, error)

    def close_session(self, session_id: str) -> None:
        """Report to the server, in the background, that the session has ended. Return at once, without an error.

        The server's cache keeps its pages better with this hint. A server that refuses it is not sent another one.
        """
        if not self._refuses_closes:
            task = asyncio.ensure_future(self._close_session(session_id))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_session(self, session_id: str) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._engine.async_close_session(session_id)
        except Exception as error:
            self._refuses_closes = self._refuses_closes or isinstance(error, BadRequestError | SessionError)
            logger.debug("The server did not note the end of session %s: %r", session_id, error)

    async def __aenter__(self) -> HealedServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Wait for at most a second until the server has noted the ends. A cancelled batch does not wait."""
        tasks = list(self._closing)
        if tasks and not (kind is not None and issubclass(kind, asyncio.CancelledError)):
            await asyncio.wait(tasks, timeout=_LAST_CLOSES)
        for task in tasks:
            task.cancel()

    async def _until_healed(
        self, engine: HttpServerEngineAdapter, knew: str, deadline: float, error: Exception
    ) -> None:
        async with self._asking:
            if engine.instance_id != knew:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise error
            logger.warning("Generation waits for the server, at most %.0f s more: %s", left, error)
            await engine.async_wait_until_healed(left)
            if engine.instance_id == knew:
                await asyncio.sleep(_RETRY_PAUSE)
