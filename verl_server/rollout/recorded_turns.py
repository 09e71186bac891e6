"""`RecordedTurn`: the record of a turn of an episode that goes on, from which another process can continue it.

`AgentLoop` hands on each turn when the environment has answered it, and each episode that has ended (`Recording`). The
trainer writes them (`train.turn_journal`). After a kill, the loop takes them back: `action_replay` brings a new
environment to the same place, and `restore` makes the trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verl_server.rollout.trajectory import Task, Trajectory, Turn


class RecordedTurn(msgspec.Struct, kw_only=True):
    """A turn that the environment has answered, and after which the episode goes on."""

    number: int
    """Number of the turn in its episode, from 0 on."""
    turn: Turn
    """The turn. Its observation is {} unless the turn is the first: it is the `answer` of the turn before."""
    observation_tokens: list[int]
    """Token ids that the policy read."""
    action_tokens: list[int]
    """Token ids that the policy sampled."""
    logprobs: list[float]
    """Log-probability of each sampled token (`Trajectory.logprobs`)."""
    weight_versions: list[str]
    """Version of the weights that sampled each token."""
    policy_logprobs: list[float | None] | None = None
    """The policy's log-probability of each sampled token, if `turn.policy_logprobs` is "given"."""
    has_choice: list[int] | None = None
    """`Trajectory.has_choice` of the sampled tokens. None if each of them had alternatives."""
    answer: dict[str, Any]
    """Observation that the environment returned for the action. The policy reads it next."""
    resumes: int = 0
    """`Trajectory.resumes` after the turn."""


class EpisodeProgress(msgspec.Struct, kw_only=True):
    """The progress of an episode: another turn was played, or the episode has ended."""

    member: int
    """Number of the episode among those of its group."""
    attempt: int = 0
    """`Trajectory.attempt`."""
    turn: RecordedTurn | None = None
    """The turn that was played."""
    ended: Trajectory | None = None
    """The episode, if it has ended and no other one replaces it."""


class RecordedEpisode(msgspec.Struct, kw_only=True):
    """An episode, as far as an earlier process has played it."""

    member: int
    """Number of the episode among those of its group."""
    attempt: int = 0
    """Number of the attempt that played."""
    turns: list[RecordedTurn] = []
    """The turns of the attempt, from the first one on."""
    ended: Trajectory | None = None
    """The whole episode, if it has ended. It is not played again."""

    @property
    def weight_versions(self) -> set[str]:
        """Labels of the weights that sampled its tokens."""
        lists = [turn.weight_versions for turn in self.turns]
        lists += [] if self.ended is None else [self.ended.weight_versions]
        return {label for labels in lists for label in labels if label}


@dataclass(frozen=True)
class Recording:
    """The records that a call of `AgentLoop.arun` writes, and those from which it continues."""

    on_progress: Callable[[int, EpisodeProgress], None] | None = None
    """Called with (group, progress) on the loop's thread. It must not block."""
    earlier: Mapping[tuple[int, int], RecordedEpisode] = field(default_factory=dict)
    """(group, member) -> the episode as an earlier process has played it."""

    def begun(self, task: Task) -> RecordedEpisode:
        """Return how far the episode of a task was played: not at all if nothing is recorded."""
        return self.earlier.get((task.group, task.member)) or RecordedEpisode(member=task.member)

    def played(self, trajectory: Trajectory) -> None:
        """Record the last turn of an episode that goes on. Its next observation has arrived."""
        if self.on_progress is not None:
            task, turn = trajectory.task, record_turn(trajectory, len(trajectory.turns) - 2)
            progress = EpisodeProgress(member=task.member, attempt=trajectory.attempt, turn=turn)
            self.on_progress(task.group, progress)

    def ended(self, trajectory: Trajectory) -> None:
        """Record an episode that has ended. One without a reward is not kept: when it is played again, it may succeed.

        One without a sampled token has cost nothing.
        """
        if self.on_progress is not None and trajectory.reward is not None and any(trajectory.loss_mask):
            task = trajectory.task
            progress = EpisodeProgress(member=task.member, attempt=trajectory.attempt, ended=trajectory)
            self.on_progress(task.group, progress)


def record_turn(trajectory: Trajectory, number: int) -> RecordedTurn:
    """Return the record of a turn of a trajectory that has the next observation, too."""
    turn = trajectory.turns[number]
    (start, middle), (_, end) = turn.observation_span, turn.action_span
    return RecordedTurn(
        number=number,
        turn=turn if number == 0 else msgspec.structs.replace(turn, observation={}),
        observation_tokens=trajectory.tokens[start:middle],
        action_tokens=trajectory.tokens[middle:end],
        logprobs=trajectory.logprobs[middle:end],
        weight_versions=trajectory.weight_versions[middle:end],
        policy_logprobs=trajectory.policy_logprobs[middle:end] if turn.policy_logprobs == "given" else None,
        has_choice=trajectory.has_choice[middle:end] or None,
        answer=trajectory.turns[number + 1].observation,
        resumes=trajectory.resumes,
    )


def restore(trajectory: Trajectory, recorded: Iterable[RecordedTurn]) -> dict[str, Any]:
    """Append recorded turns to an empty trajectory, and return the observation that the policy reads next."""
    observation: dict[str, Any] = {}
    for record in recorded:
        turn = record.turn if record.number == 0 else msgspec.structs.replace(record.turn, observation=observation)
        trajectory.append_observation(turn.observation, record.observation_tokens)
        trajectory.append_output(
            record.action_tokens,
            record.logprobs,
            record.weight_versions,
            known=turn.policy_logprobs,
            policy_logprobs=record.policy_logprobs,  # type: ignore[arg-type]
            has_choice=record.has_choice,
        )
        trajectory.turns[-1] = turn
        trajectory.resumes, observation = record.resumes, record.answer
    return observation
