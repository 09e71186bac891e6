"""`Places`: how many episodes of all groups play at one time.

`group_player` begins a group when there are places for all of its episodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Places:
    """Use it on one event loop."""

    def __init__(self, most: int | None, on_free: Callable[[], None]) -> None:
        """`most` is the number of places; None is no bound. `on_free` is called when one becomes free."""
        self._free = math.inf if most is None else most
        self._episodes = asyncio.Semaphore(2**30 if most is None else most)
        self._on_free = on_free

    def have(self, count: int) -> bool:
        """Return True if there are places for `count` more episodes."""
        return self._free >= count

    def take(self, count: int) -> GroupPlaces:
        """Take places for the `count` episodes of a group. Each becomes free when its episode has ended.

        If the group has more episodes than there are places, the rest of them waits.
        """
        self._free -= count
        return GroupPlaces(self._episodes, self._leave, count)

    def _leave(self, count: int) -> None:
        self._free += count
        self._on_free()


class GroupPlaces:
    """The places of one group: an asynchronous context manager that each of its episodes enters."""

    def __init__(self, episodes: asyncio.Semaphore, leave: Callable[[int], None], count: int) -> None:
        self._episodes = episodes
        self._leave = leave
        self.taken = count
        """Places that are not free yet."""

    async def __aenter__(self) -> None:
        await self._episodes.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._episodes.release()
        if self.taken:  # a group that began again has entered more often than it has episodes
            self.taken -= 1
            self._leave(1)

    def leave(self) -> None:
        """Leave what is left when the group has ended."""
        taken, self.taken = self.taken, 0
        if taken:
            self._leave(taken)
