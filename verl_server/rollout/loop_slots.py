"""`LoopSlots`: a bound of what happens at one time, for an owner that outlives its event loop.

A semaphore belongs to one event loop, and a trainer plays each step on a new one. `ProgramStarts` and the factory of
workspaces own slots.
"""

from __future__ import annotations

import asyncio


class LoopSlots:
    """Use it on one event loop at a time: what another loop held is forgotten."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(count)

    @property
    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._count)
        return self._semaphore
