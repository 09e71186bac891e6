"""`Attempts`: the attempts of a run at its episodes, and what becomes of each that has ended.

`run_agents` calls `play` for each place of a group. An attempt that the infrastructure ended is replaced, within the
bounds of the run. Each one is written, counted, and handed to the caller.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from verl_server.rollout.agents.branches import episode_trajectories
from verl_server.rollout.agents.episode import AgentPlayer
from verl_server.rollout.agents.notices import AgentNotices
from verl_server.rollout.agents.output import RunFolder
from verl_server.rollout.agents.types import AgentEpisode, AgentTask
from verl_server.rollout.replacements import Replacements, attempt_seed, pause_before
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory


class Attempts:
    def __init__(
        self,
        player: AgentPlayer,
        folder: RunFolder | None,
        retries: int,
        left: Replacements,
        on_finish: Callable[[AgentEpisode], None] | None,
        notices: AgentNotices,
    ) -> None:
        """`retries` bounds the replacements of one episode, and `left` those of its group."""
        self._player = player
        self._folder = folder
        self._retries = retries
        self._left = left
        self._on_finish = on_finish
        self._notices = notices
        self.episodes: list[AgentEpisode] = []
        """All attempts, in the order of their ends."""
        self.trajectories: list[Trajectory] = []
        """The branches of the final attempts, unless a folder has them."""

    async def play(self, task: AgentTask, index: int, member: int, seed: int, first: int) -> None:
        """Attempt a task until the infrastructure is not at fault, or no attempt is left. `first`: number of the first.

        `seed` is that of the attempt 0.
        """
        environment_away = False
        for attempt in itertools.count(first):
            if attempt > first:
                await asyncio.sleep(pause_before(attempt, environment_away))
            episode = AgentEpisode(task, index, member, attempt, attempt_seed(seed, attempt))
            try:
                await self._player.play(episode)
            except asyncio.CancelledError:
                self._keep(episode)  # not final: a resumed run plays it again
                raise
            is_replaced = episode.fault is Fault.INFRASTRUCTURE and attempt < self._retries and self._left.take(index)
            episode.final = not is_replaced
            self._keep(episode)
            if episode.final:
                return
            environment_away = episode.environment_away

    def _keep(self, episode: AgentEpisode) -> None:
        episode.reason = episode.reason or StopReason.ABORTED
        self.episodes.append(episode)
        branches = episode_trajectories(episode) if self._folder is None else self._folder.add(episode)
        if episode.final:
            self._notices.add(episode, branches)
            self.trajectories += branches if self._folder is None else []
        if self._on_finish is not None:
            self._on_finish(episode)
