"""`starting`: bounds the programs that start at one time, because a start reads hundreds of megabytes and needs a core.

`ProgramPlace.run` calls it for isolated programs, whose first request shows that they have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

from verl_server.rollout.agents.uplink import Traffic

_AT_ONCE = 2 * (os.cpu_count() or 1)
_START_SECONDS = 10.0
"""Seconds after which a program counts as started although it has asked for nothing."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""One semaphore for each event loop."""


@contextlib.asynccontextmanager
async def starting(traffic: Traffic) -> AsyncIterator[None]:
    """Wait until fewer than two programs a core are starting. Then run the block, which starts one.

    The program counts as starting until its first request at the uplink, until `_START_SECONDS` have passed, or until
    the end of the block.
    """
    loop = asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(_AT_ONCE))
    await slots.acquire()
    with contextlib.ExitStack() as slot:
        slot.callback(slots.release)  # `slot.close` releases it once, however often it is called
        timer = loop.call_later(_START_SECONDS, slot.close)
        traffic.on_request = slot.close
        try:
            yield
        finally:
            timer.cancel()
