"""The trajectories of an agent's episode: one for each branch of its session that the server exported.

`RunFolder` writes them, and trainers train on them.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_server.messages.session_types import Branch
from verl_server.rollout.agents.types import AgentEpisode
from verl_server.rollout.trajectory import Event, Task, Trajectory, Turn


def episode_trajectories(episode: AgentEpisode) -> list[Trajectory]:
    """Return one `Trajectory` for each branch that the server exported. Every branch has the episode's reward."""
    if episode.trajectory is None:
        return []
    known: set[tuple[str, int]] = set()
    return [_trajectory(episode, branch, known) for branch in episode.trajectory.branches]


def _trajectory(episode: AgentEpisode, branch: Branch, known: set[tuple[str, int]]) -> Trajectory:
    """Return the trajectory of a branch. `known` are the (session, turn) of earlier branches, and gets its own."""
    versions = [""] * len(branch.ids)
    for span in branch.weight_versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    turns = [
        Turn(
            observation={},
            observation_span=(turn.start, turn.prompt_end),
            action_span=(turn.prompt_end, turn.end),
            action={"calls": turn.calls} if turn.calls else {},
            finish_reason=turn.finish_reason,
            policy_logprobs=turn.policy_logprobs,
            sampling=turn.sampling,
            overridden=turn.overridden,
            messages=turn.messages,
            reply=turn.reply,
        )
        for turn in branch.turns
    ]
    waits = [Event(*event) for event in episode.events] if branch.branch == 0 else []
    events = sorted([*waits, *_generations(episode, branch, known)], key=lambda event: event.start)
    parent = branch.session.rpartition(".")[0]  # the name of a sub-agent's session begins with its agent's
    return Trajectory(
        task=Task(seed=episode.task.seed, group=episode.index, sampling_seed=episode.seed),
        tokens=list(branch.ids),
        loss_mask=list(branch.loss_mask),
        logprobs=list(branch.logprobs),
        policy_logprobs=list(branch.policy_logprobs or ()),
        has_choice=list(branch.has_choice or ()),
        weight_versions=versions,
        turns=turns,
        reward=episode.reward,
        stop_reason=episode.reason,
        fault=episode.fault,
        error=episode.error,
        events=events,
        began=episode.began,
        session=branch.session,
        parent=parent,
        branch=branch.branch,
        fork_of=branch.fork_of,
        shared=branch.shared_tokens,
        member=episode.member,
        attempt=episode.attempt,
    )


def _generations(episode: AgentEpisode, branch: Branch, known: set[tuple[str, int]]) -> Iterator[Event]:
    """Yield the generations of a branch that are not `known` from earlier branches, and add them there."""
    for turn in branch.turns:
        place = branch.session, turn.turn
        if place not in known and turn.times is not None and episode.server_clock is not None:
            accepted, _, ended = (round(time + episode.server_clock, 6) for time in turn.times)
            yield Event("generate", accepted, ended)
        known.add(place)
