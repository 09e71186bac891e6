"""`Slices`: long work on the event loop, in slices between which the loop does what else there is to do."""

from __future__ import annotations

import asyncio
import time

_SLICE_SECONDS = 0.002


class Slices:
    """Call `end` between small pieces of the work: it gives others their turn when a slice has lasted long enough."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def end(self) -> None:
        if time.monotonic() - self._began > _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()
