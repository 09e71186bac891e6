"""`SchedulerWatch`: notices that the scheduler died, or hangs, so that nobody waits for it for ever.

Run by the TokenizerManager on its loop. A process that ended is seen within a tenth of a second. One that is
stopped, or stuck in a device call, is silent: while calls wait it is asked for a sign of life, and killed when
none comes within `control_timeout`. Killed, because it could wake up later and carry out an update whose
caller was told that it failed, from memory that is being trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from verl_server.errors import ControlTimeoutError, ServerDiedError, VerlServerError
from verl_server.ipc.child_process import describe_exit

_DEATH_POLL = 0.1
"""Seconds between looks at the processes."""
_SILENCE = 10.0
"""Seconds without a message after which the scheduler is asked."""
_LATE = 1.0
"""Seconds for messages that came while this very process was stopped and its clocks ran on."""


class Child(Protocol):
    """What is needed of a `ChildProcess`."""

    name: str

    def poll(self) -> int | None: ...
    def log_tail(self) -> str: ...
    def terminate(self, grace: float = 10.0) -> int | None: ...


class SchedulerWatch:
    def __init__(
        self,
        children: Sequence[Child],
        bound: float,
        ask: Callable[[float], Awaitable[object]],
        is_waiting: Callable[[], bool],
        last_message: Callable[[], float],
    ) -> None:
        """`ask(bound)` sends something that a live scheduler answers at its next step, and raises
        ControlTimeoutError if it did not; `last_message` is the time of the newest message of any kind."""
        self._children = children
        self._bound = bound
        self._ask = ask
        self._is_waiting = is_waiting
        self._last_message = last_message

    async def until_death(self) -> ServerDiedError:
        """Returns why the scheduler is gone, as soon as it is."""
        silence = asyncio.ensure_future(self._until_silent())
        try:
            while True:
                if any(child.poll() is not None for child in self._children):
                    return await self._explain_end()
                if silence.done():
                    return await self._end_hung()
                await asyncio.sleep(_DEATH_POLL)
        finally:
            silence.cancel()

    async def _explain_end(self) -> ServerDiedError:
        """Ranks end with the one that they lost: name that one. (Only a signal tells it from those that followed.)"""
        killed = self._ended(killed=True)
        if not killed:
            await asyncio.sleep(_DEATH_POLL)  # the kernel may still be at the end of one whose loss others noticed
            killed = self._ended(killed=True)
        causes = killed or self._ended()
        ends = ", ".join(f"{child.name} ended with {describe_exit(child.poll())}" for child in causes)
        tails = [await asyncio.to_thread(child.log_tail) for child in causes]
        return ServerDiedError(f"{ends}.{''.join(tails)}")

    def _ended(self, killed: bool = False) -> list[Child]:
        codes = [(child, child.poll()) for child in self._children]
        return [child for child, code in codes if code is not None and (code < 0 or not killed)]

    async def _until_silent(self) -> None:
        while True:
            await asyncio.sleep(_SILENCE / 4)
            asked = time.monotonic()
            if not self._is_waiting() or asked - self._last_message() < _SILENCE:
                continue
            try:
                await self._ask(self._bound)
            except ControlTimeoutError:
                await asyncio.sleep(_LATE)
                if self._last_message() < asked:
                    return
            except VerlServerError:  # shutting down
                pass

    async def _end_hung(self) -> ServerDiedError:
        names, tail = ", ".join(child.name for child in self._children), ""
        for child in self._children:
            await asyncio.to_thread(child.terminate, 0.0)
            tail += await asyncio.to_thread(child.log_tail)
        return ServerDiedError(
            f"The scheduler ({names}) gave no sign of life for {self._bound:g} s (control_timeout) while calls waited "
            "for it, and was killed. Was it stopped, or stuck on its device or in another rank? If a single step or "
            f"update may take longer, raise control_timeout.{tail}"
        )
