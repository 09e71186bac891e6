"""`BusyTime`: for how long a server has had something to do. The TokenizerManager counts, `/server_info` reports.

A trainer reads it twice, and knows for which share of the time between its server was idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyTime:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start in which at least one request was in the server."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    def note(self, requests: int) -> None:
        """Take the number of requests after each change."""
        if (requests > 0) == (self._since is not None):
            return
        if requests:
            self._since = self._clock()
        else:
            self._seconds, self._since = self.seconds, None
