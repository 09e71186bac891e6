"""`SchedulerWatch` notices that a scheduler process died or hangs, so that no call waits for it forever.

The TokenizerManager runs it on its event loop. It notices the end of a process within a tenth of a second. A process
that is stopped, or stuck in a device call, sends no messages. While calls wait, `SchedulerWatch` sends a silent
scheduler a request, and kills the scheduler if no answer arrives within `control_timeout`. The scheduler must be
killed, because it could continue later and carry out an update that the trainer believes to have failed, from memory
that the trainer is writing again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from verl_server.errors import ControlTimeoutError, ServerDiedError, VerlServerError
from verl_server.ipc.child_process import describe_exit

_DEATH_POLL = 0.1
"""Seconds between checks of the processes."""
_SILENCE = 10.0
"""Seconds without a message after which a request is sent to the scheduler."""
_LATE = 1.0
"""Seconds to read messages that arrived while this process itself was stopped, when time limits expired."""


class Child(Protocol):
    """The part of `ChildProcess` that `SchedulerWatch` uses."""

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
        """`bound` is the longest time in seconds without an answer.

        `ask(bound)` sends a request that a running scheduler answers at its next step, and raises ControlTimeoutError
        after `bound` seconds without an answer. `is_waiting` returns True while calls wait for the scheduler.
        `last_message` returns the monotonic time of the newest message of any kind.
        """
        self._children = children
        self._bound = bound
        self._ask = ask
        self._is_waiting = is_waiting
        self._last_message = last_message

    async def until_death(self) -> ServerDiedError:
        """Wait until a scheduler process has died or hangs. Return the error, which states the reason."""
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
        """Return an error that names the rank that died first, which made the other ranks end.

        If a signal killed a rank, this rank died first. Otherwise the error names all ranks that have ended.
        """
        killed = self._ended(killed=True)
        if not killed:
            await asyncio.sleep(_DEATH_POLL)  # other ranks may end before the kernel reports the end of a killed one
            killed = self._ended(killed=True)
        causes = killed or self._ended()
        ends = ", ".join(f"{child.name} ended with {describe_exit(child.poll())}" for child in causes)
        tails = [await asyncio.to_thread(child.log_tail) for child in causes]
        return ServerDiedError(f"{ends}.{''.join(tails)}")

    def _ended(self, killed: bool = False) -> list[Child]:
        """Return the child processes that have ended; with `killed`, only those that a signal ended."""
        codes = [(child, child.poll()) for child in self._children]
        return [child for child, code in codes if code is not None and (code < 0 or not killed)]

    async def _until_silent(self) -> None:
        """Return when the scheduler has not answered a request in time."""
        while True:
            await asyncio.sleep(_SILENCE / 4)
            sent_at = time.monotonic()
            if not self._is_waiting() or sent_at - self._last_message() < _SILENCE:
                continue
            try:
                await self._ask(self._bound)
            except ControlTimeoutError:
                await asyncio.sleep(_LATE)
                if self._last_message() < sent_at:
                    return
            except VerlServerError:  # the server is shutting down
                pass

    async def _end_hung(self) -> ServerDiedError:
        """Kill all scheduler processes. Return the error, which states the reason."""
        names, tail = ", ".join(child.name for child in self._children), ""
        for child in self._children:
            await asyncio.to_thread(child.terminate, 0.0)
            tail += await asyncio.to_thread(child.log_tail)
        return ServerDiedError(
            f"The scheduler ({names}) did not answer for {self._bound:g} s (control_timeout) while calls waited for "
            "it, and was killed. It may have been stopped, or have been stuck on its device or in another rank. If a "
            f"single step or update may take longer, raise control_timeout.{tail}"
        )
