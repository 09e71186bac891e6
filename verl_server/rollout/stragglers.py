"""`StragglerWatch`: end the last episodes of a batch when they delay all others.

`AgentLoop.arun` creates one for each batch. The watch starts one timer when every episode has started and
`straggler_fraction` of them have ended. After `straggler_timeout` it ends the episodes that still run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator

from verl_server.rollout.episode import Episode, Limits
from verl_server.rollout.trajectory import StopReason


class StragglerWatch:
    """A context manager around the batch. `playing` is a context manager around each of its episodes."""

    def __init__(self, limits: Limits, episodes: int) -> None:
        self._timeout = limits.straggler_timeout
        self._episodes = episodes
        self._enough = max(1, math.floor(limits.straggler_fraction * episodes + 1e-9))
        self._not_started = episodes
        self._running: set[Episode] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.has_cut = False
        """True once the last episodes were ended. No replacement may begin then, because nothing would end it."""

    @contextlib.contextmanager
    def playing(self, episode: Episode) -> Iterator[None]:
        """Count `episode` as running inside the block, and as ended after it."""
        self._not_started -= 1
        self._running.add(episode)
        self._start_timer()
        try:
            yield
        finally:
            self._running.discard(episode)
            self._start_timer()

    def expect_replacement(self) -> None:
        """Count one more episode that has not started, in the place of one that ends now."""
        self._not_started += 1

    @property
    def _ended(self) -> int:
        return self._episodes - self._not_started - len(self._running)

    def _start_timer(self) -> None:
        if self._timeout is None or self._timer is not None or self._not_started or self._ended < self._enough:
            return
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._cut)

    def _cut(self) -> None:
        self.has_cut = True
        for episode in list(self._running):
            episode.cut(
                StopReason.STRAGGLER,
                f"{self._ended} of the batch's {self._episodes} episodes had ended, and this one did not end within "
                f"{self._timeout:.3g} s more (Limits.straggler_timeout).",
            )

    def __enter__(self) -> StragglerWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
