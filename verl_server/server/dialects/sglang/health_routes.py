"""Health checks: `/health`, `/ping`, `/ready`, `/health_generate` and prime-rl's `/liveness`.

Monitors end a server whose health check fails. So `/health_generate` waits for a completed step of any request, and
sends a request of its own only to an idle server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from verl_server.errors import ControlTimeoutError, ServerUnavailableError
from verl_server.messages.io_struct import GetInternalStateReq
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.http.operation import Operation
from verl_server.server.http.responses import json_response
from verl_server.server.tokenizer_manager import TokenizerManager

_LIVE_SECONDS = 5.0
"""Seconds. A scheduler that sent a message within this time is alive. Otherwise a request is sent to it."""
_HEALTH_TIMEOUT = 20.0
"""The most seconds that a health check waits for a step, or for the scheduler's answer."""
_STATE_TIMEOUT = 2.0
"""The most seconds to wait for the scheduler's figures before the next check for tokens."""
_LOOK_SECONDS = 0.1
"""Seconds between two checks for a completed step."""


class HealthApi:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def operations(self) -> list[Operation]:
        open_to_all: dict[str, Any] = {"access": "open"}
        return [
            Operation("/health", self.health, aliases=("/ping",), media_types=(), **open_to_all),
            Operation("/health_generate", self.health_generate, media_types=(), **open_to_all),
            Operation("/ready", self.ready, media_types=(), **open_to_all),
            Operation("/liveness", self.liveness, **open_to_all),
        ]

    async def health(self, request: Request) -> Response:
        """Return 200 with an empty body while the scheduler is alive, even during a pause or a weight update."""
        await self._check_live()
        return Response()

    async def liveness(self, request: Request) -> Response:
        """Return {"status": "ok"} when `/health` returns 200. The name is prime-rl's."""
        await self._check_live()
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Return the response of `/health`, but 503 while generation is paused."""
        if (pause := self._manager.controls.pause) is not None:
            raise ServerUnavailableError(f"Generation is {pause}.")
        return await self.health(request)

    async def health_generate(self, request: Request) -> Response:
        """Return 200 when a step of any request is completed within 20 seconds; an idle server generates one token. A
        full queue is no fault. During a pause or a weight update, return the response of `/health`."""
        if self._may_hold_generation:
            return await self.health(request)
        self._check_ready()
        await self._await_step()
        return Response()

    @property
    def _may_hold_generation(self) -> bool:
        return self._manager.controls.is_paused or self._manager.controls.updating_weights

    async def _await_step(self) -> None:
        """Return when a step was completed. Raise ServerUnavailableError if no step was completed in time.

        An idle server gets a request. If this request fails, raise its error.
        """
        manager, began = self._manager, time.monotonic()
        if manager.num_requests and began - manager.last_tokens < _LIVE_SECONDS:
            return
        tasks = {asyncio.ensure_future(self._watch_steps(began))}
        if not manager.num_requests:
            tasks.add(asyncio.ensure_future(self._probe()))
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError:
            raise ServerUnavailableError(f"No step was completed within {_HEALTH_TIMEOUT:g} s.") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self) -> None:
        """Generate one token. If the queue is full, wait until cancelled, because the other requests show progress."""
        probe = GenerateReqInput(
            input_ids=[0, 0], sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        )
        generation = await self._manager.submit(probe)
        try:
            await generation.result()
        except ServerUnavailableError:
            if self._manager.num_requests <= 1:  # the probe itself may still be counted
                raise
            await asyncio.Event().wait()
        finally:
            generation.close()

    async def _watch_steps(self, began: float) -> None:
        """Return when there is progress: a token has arrived since `began`, or the scheduler has counted a step.

        A step of a long prompt yields no token. Return also if generation is held and the scheduler is alive.
        """
        manager = self._manager
        before: int | None = None
        while manager.last_tokens <= began:
            if self._may_hold_generation:
                return await self._check_live()
            try:
                reply = await manager.control(GetInternalStateReq(), timeout=_STATE_TIMEOUT)
                steps = int((reply.payload or {}).get("num_steps", 0))
                if before is not None and steps > before:
                    return
                before = steps
            except ControlTimeoutError:
                pass
            await asyncio.sleep(_LOOK_SECONDS)

    def _check_ready(self) -> None:
        self._manager.check_serving()
        if not self._manager.ready:
            raise ServerUnavailableError("The server is starting: its first request was not answered yet.")

    async def _check_live(self) -> None:
        """Raise an error unless the scheduler is alive.

        While a control call is in flight, the scheduler counts as alive, because an update may keep it from answering.
        """
        self._check_ready()
        manager = self._manager
        if time.monotonic() - manager.last_message < _LIVE_SECONDS or manager.controls.in_flight:
            return
        try:
            await manager.control(GetInternalStateReq(), timeout=_HEALTH_TIMEOUT)
        except ControlTimeoutError as error:
            raise ServerUnavailableError(f"The health check failed: {error}") from None
