"""`PauseWatch` warns of requests that wait while generation is paused, and refuses requests that wait too long.

The TokenizerManager owns it and runs it on its event loop. As in SGLang, requests to `/generate` wait while generation
is paused, and the server counts as healthy. So a pause that is never ended looks like a hang. So the log reports when a
pause begins and ends and, every 30 seconds, how many requests wait. `/server_info` and `/metrics` report how long the
pause has lasted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime

from verl_server.errors import ServerUnavailableError
from verl_server.server.request_state import ReqState

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Seconds between checks of the waiting requests."""
_WARN_SECONDS = 30.0
"""Seconds between warnings, and from the beginning of a pause to the first warning."""


@dataclass(frozen=True)
class Pause:
    """A pause of generation that has not ended."""

    mode: str
    since: float = field(default_factory=time.time)
    """Beginning of the pause as Unix time."""
    began: float = field(default_factory=time.monotonic)
    """Beginning of the pause on the monotonic clock."""

    @property
    def seconds(self) -> float:
        """Seconds since the pause began."""
        return time.monotonic() - self.began

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().isoformat(timespec="seconds")
        return f"paused since {since} (pause_generation, mode {self.mode!r})"


class PauseWatch:
    def __init__(
        self,
        bound: float | None,
        pause: Callable[[], Pause | None],
        waiting: Callable[[], Collection[ReqState]],
        refuse: Callable[[ReqState, ServerUnavailableError], None],
    ) -> None:
        """`bound` is the number of seconds that a request may wait in a pause (None: no limit).

        `pause` returns the current pause. `waiting` returns the requests without an answer. `refuse` ends a request
        with an error.
        """
        self._bound, self._pause, self._waiting, self._refuse = bound, pause, waiting, refuse
        self._warned = 0.0

    async def run(self) -> None:
        """Call `look` every second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Refuse requests that have waited too long at `now` (monotonic seconds), and log a warning if one is due."""
        pause = self._pause()
        if pause is None:
            return
        for state in list(self._waiting()):
            waited = now - max(pause.began, state.created)
            if self._bound is not None and waited >= self._bound:
                self._refuse(
                    state,
                    ServerUnavailableError(
                        f"Generation is {pause}: the request waited {waited:.0f} s (paused_request_timeout). Call "
                        "continue_generation, then send the request again."
                    ),
                )
        if (count := len(self._waiting())) and now - max(pause.began, self._warned) >= _WARN_SECONDS:
            self._warned = now
            logger.warning(
                "Generation is %s, for %.0f s: %d requests wait for continue_generation.",
                pause,
                now - pause.began,
                count,
            )
