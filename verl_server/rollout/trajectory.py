"""`Trajectory`: what one episode leaves behind, token by token.

Filled by an `Episode`, read by the trainer and the report. Token in, token out: `tokens` is exactly what the
policy read and sampled, never text that was tokenized again. An episode that its environment or the server
broke off has no reward: it is counted, and nobody mistakes it for a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The trajectory's own token limit."""
    CONTEXT_FULL = "context_full"
    """The next tokens exceed the model's context length or the server's KV cache."""
    TIME_LIMIT = "time_limit"
    """The trajectory's own time limit."""
    STRAGGLER = "straggler"
    """The rest of the batch had ended, and `straggler_timeout` after it."""
    ENV_TIMEOUT = "env_timeout"
    ENV_ERROR = "env_error"
    GENERATION_ERROR = "generation_error"
    ABORTED = "aborted"
    """The rollout was cancelled, or the server kept aborting the request."""

    @property
    def is_scored(self) -> bool:
        """Whether the policy is answerable for this end. The others say nothing about the policy."""
        return self in (StopReason.DONE, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to play."""

    seed: int
    """Of the environment's episode."""
    group: int = 0
    """Trajectories of one group are compared with each other (GRPO); by custom they share `seed`."""
    episode_id: str | None = None
    """Passed to the environment's reset."""
    sampling_seed: int | None = None
    """Makes the policy's draws repeatable, whatever runs beside it."""


class Turn(msgspec.Struct, kw_only=True):
    """One observation and the action that answered it. Spans are token positions [start, end)."""

    observation: dict[str, Any]
    observation_span: tuple[int, int]
    action_span: tuple[int, int] = (0, 0)
    action: dict[str, Any] | None = None
    """What the environment was given; None if the episode ended before."""
    reward: float | None = None
    finish_reason: str | None = None
    """Of the generation: stop, length or abort."""


class Event(msgspec.Struct, array_like=True):
    """What the episode was waiting for, in seconds since the rollout began."""

    kind: str
    """queue, env or generate."""
    start: float
    end: float


class Trajectory(msgspec.Struct, kw_only=True):
    task: Task
    tokens: list[int] = []
    loss_mask: list[int] = []
    """1 where the policy sampled the token, 0 where it read it."""
    logprobs: list[float] = []
    """Of sampled tokens, as the server computed them when it sampled; 0.0 elsewhere."""
    weight_versions: list[str] = []
    """Under which each token was sampled; "" elsewhere."""
    turns: list[Turn] = []
    final_observation: dict[str, Any] | None = None
    """What the environment said last, after the last action."""
    reward: float | None = None
    """Sum over the turns; None if the episode was not scored."""
    stop_reason: StopReason | None = None
    error: str | None = None
    """What failed, for the ends that are failures."""
    resumes: int = 0
    """Generations that were aborted and taken up again."""
    events: list[Event] = []

    @property
    def is_trainable(self) -> bool:
        """Has a reward, and at least one token that the policy chose."""
        return self.reward is not None and any(self.loss_mask)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.loss_mask)

    def seconds(self, kind: str) -> float:
        """Time spent in events of one kind."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    def append_observation(self, observation: dict[str, Any], token_ids: Sequence[int]) -> None:
        """Begin a turn with what the policy reads."""
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        self.loss_mask.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.weight_versions.extend([""] * len(token_ids))
        end = len(self.tokens)
        self.turns.append(Turn(observation=observation, observation_span=(start, end), action_span=(end, end)))

    def append_output(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[str]) -> None:
        """Add what the policy sampled to the current turn."""
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(token_ids)} tokens, {len(logprobs)} logprobs and {len(versions)} versions.")
        self.tokens.extend(token_ids)
        self.loss_mask.extend([1] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.weight_versions.extend(versions)
        turn = self.turns[-1]
        turn.action_span = (turn.action_span[0], len(self.tokens))

    def action_tokens(self) -> list[int]:
        """What the policy sampled in the current turn."""
        start, end = self.turns[-1].action_span
        return self.tokens[start:end]

    def finish(self, reason: StopReason, error: str | None = None) -> None:
        """Settle the end, once; the reward follows from the reason."""
        if self.stop_reason is not None:
            return
        self.stop_reason = reason
        self.error = error
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if reason is StopReason.DONE:
            self.reward = sum(rewards) if rewards else None  # an environment that never judged gives no score
        elif reason.is_scored:
            self.reward = sum(rewards)


class RolloutStats(msgspec.Struct, kw_only=True):
    """Figures of a set of trajectories."""

    trajectories: int
    trainable: int
    stop_reasons: dict[str, int]
    mean_reward: float | None
    """Over those that have one."""
    mean_turns: float
    sampled_tokens: int
    generate_seconds: float
    """Summed over trajectories, so it exceeds wall time."""
    env_seconds: float


def summarize(trajectories: Sequence[Trajectory]) -> RolloutStats:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    reasons = Counter(str(t.stop_reason) for t in trajectories)
    return RolloutStats(
        trajectories=len(trajectories),
        trainable=sum(t.is_trainable for t in trajectories),
        stop_reasons=dict(reasons.most_common()),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mean_turns=sum(len(t.turns) for t in trajectories) / max(1, len(trajectories)),
        sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        generate_seconds=sum(t.seconds("generate") for t in trajectories),
        env_seconds=sum(t.seconds("env") for t in trajectories),
    )


def append_jsonl(path: Path, records: Iterable[Any]) -> None:
    """One JSON line for each record (a struct or a dict)."""
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def read_jsonl(path: Path) -> list[Trajectory]:
    """The trajectories of a file that `append_jsonl` wrote; other keys of a line are ignored."""
    with path.open("rb") as file:
        return [msgspec.json.decode(line, type=Trajectory) for line in file]
