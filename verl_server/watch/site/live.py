"""`LiveStreams`: server-sent events that say which runs have grown. `app` streams them to the page.

A stream ends when the client leaves it or the server stops. A run that grows all the time has one event a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from verl_server.watch.site.encoding import encoded
from verl_server.watch.site.overview import live
from verl_server.watch.site.runs import OpenRuns

QUIET_SECONDS = 15.0
"""Seconds without an event after which a comment is sent, so that both sides notice a broken connection."""


class LiveStreams:
    """The open streams of a server. `stop` ends them. Use it on the event loop's thread."""

    def __init__(self, runs: OpenRuns) -> None:
        self._runs = runs
        self._has_stopped = False
        self._open: set[asyncio.Event] = set()
        """For each stream, the event that wakes it."""

    @property
    def open(self) -> int:
        """Number of open streams."""
        return len(self._open)

    def stop(self) -> None:
        self._has_stopped = True
        for grown in self._open:
            grown.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the state of each run, and then each change."""
        loop = asyncio.get_running_loop()
        grown = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(grown.set)

        self._open.add(grown)
        unlisten = self._runs.listen(wake)
        seen: dict[str, tuple[int, str]] = {}
        try:
            yield b": the runs that have grown\n\n"
            while not self._has_stopped:
                grown.clear()
                for event in await asyncio.to_thread(self._changed, seen):
                    yield event
                try:
                    await asyncio.wait_for(grown.wait(), QUIET_SECONDS)
                except TimeoutError:
                    yield b": nothing new\n\n"
        finally:
            unlisten()
            self._open.discard(grown)

    def _changed(self, seen: dict[str, tuple[int, str]]) -> list[bytes]:
        """Return the events of the runs that are not as `seen` says, and note them there."""
        events = []
        for run in self._runs.runs.values():
            state = (run.generation(), run.tail.state)
            if seen.get(run.id) != state:
                seen[run.id] = state
                events.append(b"event: run\ndata: " + encoded(live(run)) + b"\n\n")
        return events
