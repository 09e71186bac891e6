"""`AgentNotices`: what a run of agents logs once about its episodes, while it goes on.

`run_agents` adds each final episode, and calls `end` at its end. A trainer passes one object to the calls of all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.rollout.agents.branch_notice import BranchNotice
from verl_server.rollout.agents.silence_notice import SilenceNotice
from verl_server.rollout.agents.types import AgentEpisode
from verl_server.rollout.trajectory import Trajectory
from verl_server.rollout.unsampled import UnsampledNotice


class AgentNotices:
    def __init__(self) -> None:
        self._unsampled = UnsampledNotice(agent=True)
        self._silence = SilenceNotice()
        self._branches = BranchNotice()

    def add(self, episode: AgentEpisode, branches: Sequence[Trajectory]) -> None:
        """Log what a final episode and its trajectories are the first to show."""
        if episode.is_unsampled:
            self._unsampled.give(episode.name, episode.reason, episode.reward)
        self._silence.add(episode)
        self._branches.add(episode.name, branches)

    def end(self) -> None:
        """Judge a run that had few episodes."""
        self._silence.end()
        self._branches.end()
