"""`Slices` divides long work on the event loop into slices, between which the loop does other work."""

from __future__ import annotations

import asyncio
import time

_SLICE_SECONDS = 0.002
"""Duration of a slice."""


class Slices:
    """Call `end` between small pieces of the work. When a slice has lasted long enough, `end` lets other tasks run."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def end(self) -> None:
        if time.monotonic() - self._began > _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()
