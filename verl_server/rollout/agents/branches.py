"""The trajectories of an agent's episode: one for each branch of its session that the server exported.

`RunFolder` writes them, and trainers train on them.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_server.messages.session_types import Branch
from verl_server.rollout.agents.types import AgentEpisode
from verl_server.rollout.branch_trajectory import branch_trajectory
from verl_server.rollout.trajectory import Event, Task, Trajectory


def episode_trajectories(episode: AgentEpisode) -> list[Trajectory]:
    """Return one `Trajectory` for each branch that the server exported. Every branch has the episode's reward."""
    if episode.trajectory is None:
        return []
    known: set[tuple[str, int]] = set()
    trajectories = [_trajectory(episode, branch, known) for branch in episode.trajectory.branches]
    for first in trajectories[:1]:
        first.retry_tokens = episode.trajectory.retry_tokens
        first.unrecorded_turns = episode.trajectory.unrecorded_turns
    return trajectories


def _trajectory(episode: AgentEpisode, branch: Branch, known: set[tuple[str, int]]) -> Trajectory:
    """Return the trajectory of a branch. `known` are the (session, turn) of earlier branches, and gets its own."""
    waits = [Event(*event) for event in episode.events] if branch.branch == 0 else []
    task = Task(seed=episode.task.seed, group=episode.index, sampling_seed=episode.seed)
    trajectory = branch_trajectory(branch, task)
    trajectory.reward, trajectory.stop_reason = episode.reward, episode.reason
    trajectory.metrics = episode.metrics
    trajectory.fault, trajectory.error = episode.fault, episode.error
    trajectory.events = sorted([*waits, *_generations(episode, branch, known)], key=lambda event: event.start)
    trajectory.began = episode.began
    trajectory.member, trajectory.attempt = episode.member, episode.attempt
    return trajectory


def _generations(episode: AgentEpisode, branch: Branch, known: set[tuple[str, int]]) -> Iterator[Event]:
    """Yield the generations of a branch that are not `known` from earlier branches, and add them there."""
    for turn in branch.turns:
        place = branch.session, turn.turn
        if place not in known and turn.times is not None and episode.server_clock is not None:
            accepted, _, ended = (round(time + episode.server_clock, 6) for time in turn.times)
            yield Event("generate", accepted, ended)
        known.add(place)
