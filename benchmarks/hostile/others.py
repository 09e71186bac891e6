"""Measures how an attack disturbs other callers: by the loop that is held, a late `/health`, a gap between tokens."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import urllib.parse

import numpy as np

from benchmarks.token_gaps import Interval, Times
from verl_server.server.tokenizer_manager import TokenizerManager

_PROBE_SECONDS = 0.02
_REQUEST_SECONDS = 120.0


class LoopWatch:
    """Measures the longest processor time of an event loop's thread between two turns of this object's task."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._longest = 0.0
        self._task = asyncio.run_coroutine_threadsafe(self._watch(), manager.loop)

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self._longest = max(self._longest, time.thread_time() - before)

    def take_ms(self) -> float:
        """The longest time since the last call, in milliseconds."""
        longest, self._longest = self._longest, 0.0
        return 1e3 * longest

    def stop(self) -> None:
        self._task.cancel()


class HealthProbe:
    """Calls `/health` repeatedly, and records (start, end) of each call.

    The calls use one connection of their own, or each of them a new one (`reconnects`).
    """

    def __init__(self, url: str, *, reconnects: bool = False) -> None:
        self._host, self._reconnects = urllib.parse.urlsplit(url).netloc, reconnects
        self._stop = threading.Event()
        self.probes: list[Interval] = []
        self.errors = 0
        """Calls that failed. They were repeated, and count with the time of both."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=_REQUEST_SECONDS)
        while not self._stop.wait(_PROBE_SECONDS):
            began = time.perf_counter()
            while not self._is_answered(connection) and not self._stop.wait(_PROBE_SECONDS):
                self.errors += 1
            self.probes.append((began, time.perf_counter()))
        connection.close()

    def _is_answered(self, connection: http.client.HTTPConnection) -> bool:
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
            return False
        if self._reconnects:
            connection.close()
        return True

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(_REQUEST_SECONDS)


def longest_gap_ms(arrivals: list[Times], window: Interval) -> float:
    """The longest token gap that overlaps a window, in milliseconds."""
    longest = 0.0
    for times in arrivals:
        starts, ends = times[:-1], times[1:]
        inside = (starts < window[1]) & (ends > window[0])
        longest = max(longest, float(np.max(ends[inside] - starts[inside], initial=0.0)))
    return 1e3 * longest


def slowest_ms(probes: list[Interval], window: Interval) -> float:
    """The longest probe that overlaps a window, in milliseconds."""
    return 1e3 * max((end - start for start, end in probes if start < window[1] and end > window[0]), default=0.0)
