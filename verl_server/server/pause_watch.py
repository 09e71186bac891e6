"""`PauseWatch`: sees to it that nobody waits in a paused server unseen, nor longer than the settings permit.

Owned by the TokenizerManager and run on its loop. `/generate` waits while generation is paused, as in SGLang, and the
server is healthy all the while: a pause that nobody ends looks like a hang. So the log says when a pause begins and
ends and, again and again, how many requests wait; `/server_info` and `/metrics` say since when.
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
"""Time between looks at the requests that wait."""
_WARN_SECONDS = 30.0
"""Time between warnings; the first one comes so long after the pause began."""


@dataclass(frozen=True)
class Pause:
    """A pause of generation that has begun and not ended."""

    mode: str
    since: float = field(default_factory=time.time)
    """Unix time."""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
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
        """`bound` is the most seconds that a request waits in a pause; `waiting` returns requests without an answer;
        `refuse` ends one of them with an error."""
        self._bound, self._pause, self._waiting, self._refuse = bound, pause, waiting, refuse
        self._warned = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Refuse what has waited too long at `now` (monotonic seconds), and warn if it is time."""
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
                        "continue_generation, then send it again."
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
