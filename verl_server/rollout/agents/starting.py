"""`ProgramStarts` bounds the programs that start at one time: a start reads hundreds of megabytes and needs a core.

A run of agents owns one, or its caller, who plays several runs at once. `ProgramPlace.run` enters it for isolated
programs, whose first request shows that they have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from verl_server.rollout.agents.uplink import Traffic
from verl_server.rollout.loop_slots import LoopSlots

_AT_ONCE = 2 * (os.cpu_count() or 1)
_START_SECONDS = 10.0
"""Seconds after which a program counts as started although it has asked for nothing."""


class ProgramStarts:
    """The programs that start now. Use it on one event loop at a time; the loop may be another one later."""

    def __init__(self, at_once: int = _AT_ONCE, seconds: float = _START_SECONDS) -> None:
        """`at_once`: most programs that start at one time. `seconds`: a program has started then at the latest."""
        self._seconds = seconds
        self._slots = LoopSlots(at_once)

    @contextlib.asynccontextmanager
    async def start(self, traffic: Traffic) -> AsyncIterator[None]:
        """Wait until there is room. Then run the block, which starts a program.

        The program counts as starting until its first request at the uplink, until the seconds have passed, or until
        the end of the block.
        """
        slots = self._slots.here
        await slots.acquire()
        with contextlib.ExitStack() as slot:
            slot.callback(slots.release)  # `slot.close` releases it once, however often it is called
            timer = asyncio.get_running_loop().call_later(self._seconds, slot.close)
            traffic.on_request = slot.close
            try:
                yield
            finally:
                timer.cancel()
