"""`HealedServer`: the engine of an `AgentLoop`, which outlives a restart of its server and samples no other weights.

A server that is started again serves the weights that it loads. Until the engine that pushes has healed it (`heal`), or
its owner has accepted it, every episode waits here; then it goes on from its own tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from verl_server.engine.base import EngineBase
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import ServerDiedError, ServerRestartedError, ServerStoppingError

logger = logging.getLogger(__name__)

_RETRY_PAUSE = 0.5
"""Seconds before a generation is sent again to a server that answers, but broke its connection."""


class HealedServer:
    """A `Generator` for the episodes of one batch; used on one event loop."""

    def __init__(self, engine: EngineBase, restart_timeout: float) -> None:
        self._engine = engine
        self._restart_timeout = restart_timeout
        self._asking = asyncio.Lock()  # one episode asks the server, the others learn of it from the engine

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        return_logprob: Any = False,
        timeout: float | None = None,
    ) -> Any:
        """`EngineBase.async_generate`, sent again once the server is back and healed.

        Raises what kept it from that `restart_timeout` seconds after the first failure. An engine that cannot come back
        (it was launched here, or runs in this process) raises at once.
        """
        engine, deadline = self._engine, None
        while True:
            knew = engine.instance_id if isinstance(engine, HttpServerEngineAdapter) else None
            try:
                return await engine.async_generate(
                    prompt, sampling_params, input_ids, return_logprob=return_logprob, timeout=timeout
                )
            except (ServerRestartedError, ServerDiedError, ServerStoppingError) as error:
                if knew is None or not isinstance(engine, HttpServerEngineAdapter):
                    raise  # it runs in this process, or names no run by which a restart would show
                deadline = deadline or time.monotonic() + self._restart_timeout
                await self._until_healed(engine, knew, deadline, error)

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
