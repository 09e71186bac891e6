"""The live view of an agent run: its figures in a terminal, a line every few seconds elsewhere.

`cli.py` shows it. `Progress` (episode.py) has the running episodes. This module counts the episodes that have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator

from rich.console import Console, RenderableType
from rich.live import Live

from verl_server.rollout.agents.episode import Progress
from verl_server.rollout.agents.types import AgentEpisode
from verl_server.rollout.listing import Listing, Row

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 5.0


class ProgressView:
    """The live view. `note`, the `on_finish` of the run, counts the ends of episodes."""

    def __init__(self, progress: Progress, expected: int, console: Console) -> None:
        """Show a run that will play `expected` episodes."""
        self._progress = progress
        self._expected = expected
        self._console = console
        self._reasons: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._tokens = 0
        self._done = self._failed = self._retried = self._unsampled = 0

    def note(self, episode: AgentEpisode) -> None:
        """Count an attempt that has ended."""
        self._tokens += episode.tokens
        if not episode.final:
            self._retried += 1
            return
        self._reasons[str(episode.reason)] += 1
        if episode.is_unsampled:
            self._unsampled += 1
        elif episode.reward is None:
            self._failed += 1
        else:
            self._done += 1
            self._rewards.append(episode.reward)

    def facts(self) -> dict[str, str]:
        """Return {name: figure} of the figures in the view."""
        began = self._progress.began  # the start of a server is not counted
        seconds = 1e-9 if began is None else max(1e-9, time.monotonic() - began)
        waiting = self._progress.in_environment
        reward = f"{sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "-"
        return {
            "running": str(self._progress.running - waiting),
            "in environment": str(waiting),
            "done": f"{self._done} of {self._expected}",
            "failed": str(self._failed),
            "retried": str(self._retried),
            "unsampled": str(self._unsampled),
            "tokens/s": f"{self._tokens / seconds:.0f}",
            "reward": reward,
            "seconds": f"{seconds:.0f}",
        }

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show the view until the block ends."""
        if not self._console.is_terminal:
            task = asyncio.ensure_future(self._lines())
            try:
                yield
            finally:
                task.cancel()
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=1 / _REFRESH_SECONDS):
            yield

    def _table(self) -> RenderableType:
        facts = self.facts()
        return Listing(tuple(facts), [Row(tuple(facts.values()))], left=0)

    async def _lines(self) -> None:
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            line = "  ".join(f"{name} {value}" for name, value in self.facts().items())
            self._console.print(
                line if self._progress.began else "waiting for the server", highlight=False, soft_wrap=True
            )
