"""`Trajectory`: the record of one episode, token by token.

An `Episode` fills it; the trainer and the report read it. `tokens` is exactly what the policy read and sampled, never
text that was tokenized again. Each end has a fault (`faults`): an episode that the environment or the server ended has
no reward, so that their failure is not counted as a failure of the policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import decode_json, numbered_lines
from verl_server.files.json_values import jsonable
from verl_server.messages.session_types import Message, PolicyLogprobs


class StopReason(StrEnum):
    """Reasons for the end of an episode."""

    DONE = "done"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """`Limits.max_turns`."""
    MAX_TOKENS = "max_tokens"
    """`Limits.max_tokens`."""
    CONTEXT_FULL = "context_full"
    """The next tokens exceed the model's context length or the server's KV cache."""
    TIME_LIMIT = "time_limit"
    """`Limits.trajectory_timeout`."""
    STRAGGLER = "straggler"
    """`Limits.straggler_timeout`: the rest of the batch had ended."""
    ENV_TIMEOUT = "env_timeout"
    """The environment did not answer one call in time."""
    ENV_ERROR = "env_error"
    """The environment failed, or its server was full."""
    ACTION_REFUSED = "action_refused"
    """The environment refused an action of the policy (VALIDATION_ERROR)."""
    GENERATION_ERROR = "generation_error"
    """The rollout server failed."""
    GENERATION_TIMEOUT = "generation_timeout"
    """The rollout server did not answer a turn within `Limits.generate_timeout`."""
    ABORTED = "aborted"
    """The caller cancelled the rollout, or the server aborted the generation again and again."""
    AGENT_ERROR = "agent_error"
    """The agent raised an exception, or its program ended with an exit code other than 0."""
    AGENT_KILLED = "agent_killed"
    """A signal ended the agent's program."""
    ISOLATION_FAILED = "isolation_failed"
    """The agent's program could not be started, or its isolation failed."""
    IDLE = "idle"
    """The agent neither generated nor called its environment for `AgentLimits.idle_seconds`."""
    SESSION_LOST = "session_lost"
    """The agent's session ended on the server, or the server went away for too long."""

    @property
    def is_regular(self) -> bool:
        """True if the environment ended the episode, or a limit of turns or tokens did: nothing failed."""
        return self in (StopReason.DONE, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL)


class Fault(StrEnum):
    """The party that caused the end of an episode. `rollout.faults` has the fault of each `StopReason`."""

    POLICY = "policy"
    """The policy: the episode is scored, and gets no second try."""
    INFRASTRUCTURE = "infrastructure"
    """The environment, the server or the caller: another episode may replace this one, which has no reward."""
    UNKNOWN = "unknown"
    """Either of them: the episode has no reward and is not replaced."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to play."""

    seed: int
    """Seed of the environment's episode."""
    group: int = 0
    """GRPO compares the trajectories of one group with each other. They usually share `seed`."""
    episode_id: str | None = None
    """Argument of the environment's `reset`."""
    sampling_seed: int | None = None
    """Seed of the policy's samples, which then do not depend on other requests."""
    member: int = 0
    """Number of the episode among those of its group."""
    environment: str | None = None
    """Name of the environment in a mixture of several. None: there is one only."""


class Turn(msgspec.Struct, kw_only=True):
    """One observation and the action that answered it. Spans are token positions [start, end)."""

    observation: dict[str, Any]
    """Observation that the environment returned."""
    observation_span: tuple[int, int]
    """[start, end) of the tokens that the policy read."""
    action_span: tuple[int, int] = (0, 0)
    """[start, end) of the tokens that the policy sampled."""
    action: dict[str, Any] | None = None
    """The action that was sent to the environment, None if the episode ended before or the policy wrote no action."""
    reward: float | None = None
    """Reward of the action, None if the environment returned none."""
    finish_reason: str | None = None
    """Finish type of the generation: stop, length or abort."""
    policy_logprobs: PolicyLogprobs = "unknown"
    """Field with the action's log-probabilities under the policy, the log-softmax of (the model's logits /
    temperature).

    "same": `Trajectory.logprobs`. "given": `Trajectory.policy_logprobs`, because the action was sampled under a mask, a
    penalty or a bias. "unknown": no field has them, so no trainer can use the action.
    """
    sampling: dict[str, Any] = {}
    """Parameters that shaped the distribution: `session_types.BranchTurn.sampling`. {} if they were not recorded."""
    overridden: dict[str, Any] = {}
    """Parameters of an agent for which its session forces other values: `session_types.BranchTurn.overridden`."""
    began: str | None = None
    """Why a branch of an agent's session begins with this turn: `session_types.BranchTurn.began`."""
    messages: list[Message] = []
    """Messages that the policy read for the first time in this turn, as the agent sent them: each message of a branch
    is in one turn. [] without an agent (`observation` has the text), for prompts of token ids, in records of an earlier
    version, and within `Trajectory.shared`: there the branch `fork_of` has them."""
    reply: Message | None = None
    """The policy's answer as the agent received it. None where `messages` is [] for such a reason, and for an answer
    without text."""


class Event(msgspec.Struct, array_like=True):
    """A wait of the episode. Times are seconds since the rollout began (`Trajectory.began`)."""

    kind: str
    """Kind of the wait: queue (for a place), env or generate."""
    start: float
    """Start of the wait."""
    end: float
    """End of the wait."""


class Trajectory(msgspec.Struct, kw_only=True):
    """The record of one episode. A list about tokens has one entry for each token, unless it is [] as described."""

    task: Task
    """Task that the episode played."""
    tokens: list[int] = []
    """Token ids of all observations and actions, in order."""
    loss_mask: list[int] = []
    """1 for a token that the policy sampled, 0 for a token that the policy read."""
    logprobs: list[float] = []
    """Log-probability of each sampled token, from the server at sampling time. 0.0 for tokens that were read."""
    policy_logprobs: list[float | None] = []
    """[] if `logprobs` are the policy's log-probabilities. Otherwise the policy's log-probability of each token: None
    for a sampled token if it is unknown, and 0.0 for tokens that were read."""
    has_choice: list[int] = []
    """[] if each sampled token had alternatives. Otherwise one number for each token: 1 for a sampled token that had
    alternatives, 0 for a sampled token that was the only one allowed, and 0 for tokens that were read."""
    weight_versions: list[str] = []
    """Version of the weights that sampled each token. "" for tokens that were read."""
    turns: list[Turn] = []
    """Turns of the episode, in order."""
    final_observation: dict[str, Any] | None = None
    """The observation after the last action. The policy did not read it."""
    reward: float | None = None
    """Sum of the turns' rewards, None if the episode has no reward."""
    metrics: dict[str, float] = {}
    """Figures beside the reward that the agent's own code computed: those of environments of verifiers. All branches of
    an episode have the same ones."""
    stop_reason: StopReason | None = None
    """Reason for the end of the episode, None while the episode runs."""
    fault: Fault | None = None
    """The party that caused the end. None while the episode runs, and in records of an earlier version."""
    error: str | None = None
    """Cause of the episode's failure, None if the episode did not fail."""
    resumes: int = 0
    """Number of generations that the server aborted and the episode resumed."""
    events: list[Event] = []
    """Waits of the episode, in order. In an agent's episode, the branch 0 has those for the environment, and a
    generation belongs to the first branch that has its turn."""
    began: float | None = None
    """Wall time of second 0 of `events`, in seconds since 1970. All episodes of a rollout have the same. None in
    records of an earlier version."""
    session: str = ""
    """Id of the agent's session on the server. "" if an `AgentLoop` played the episode."""
    parent: str = ""
    """Id of the session of the agent whose sub-agent has this session. "" if it is no sub-agent's."""
    branch: int = 0
    """Number of the branch in the episode. A session whose history the agent edited has several."""
    fork_of: int | None = None
    """Number of the branch of the episode that has the first `shared` tokens, too. None: there is none."""
    shared: int = 0
    """Number of leading tokens that the branch `fork_of` has, too. None of them counts a second time in the loss."""
    retry_tokens: int | None = None
    """In the branch 0 of an agent's episode: number of tokens that were sampled and are in no branch, because their
    reply reached nobody and was sampled again. None in other branches, and in records of an earlier version."""
    unrecorded_turns: int | None = None
    """Likewise: number of generations that began and of which no token is recorded."""
    member: int = 0
    """Number of the episode among those of its group."""
    attempt: int = 0
    """Number of episodes that this one and others replaced before it, because the infrastructure had ended them."""
    kept_turns: int | None = None
    """Number of first turns that an earlier start of the run played, and that were not played again: all turns of an
    episode that had ended. 0: the environment did not repeat their answers, so the episode began again
    (docs/checkpoints.md). None: no earlier start of the run has recorded a turn."""

    @property
    def is_trainable(self) -> bool:
        """True if there is a reward and at least one token to train on."""
        return self.reward is not None and any(self.trained_mask)

    @property
    def trained_mask(self) -> list[int]:
        """Return 1 for each token to train on: a token that was sampled and that had an alternative.

        0 for other tokens.
        """
        if not self.has_choice:
            return self.loss_mask
        return [mask & choice for mask, choice in zip(self.loss_mask, self.has_choice, strict=True)]

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    @property
    def forced_tokens(self) -> int:
        """Number of sampled tokens that had no alternative."""
        return self.sampled_tokens - sum(self.trained_mask)

    def seconds(self, kind: str) -> float:
        """Return the total time of the events of one kind, in seconds."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    def append_observation(self, observation: dict[str, Any], token_ids: Sequence[int]) -> None:
        """Begin a turn with the tokens that the policy reads."""
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        self.loss_mask.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.weight_versions.extend([""] * len(token_ids))
        if self.policy_logprobs:
            self.policy_logprobs.extend([0.0] * len(token_ids))
        if self.has_choice:
            self.has_choice.extend([0] * len(token_ids))
        end = len(self.tokens)
        self.turns.append(Turn(observation=observation, observation_span=(start, end), action_span=(end, end)))

    def append_output(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[str],
        *,
        known: PolicyLogprobs = "same",
        policy_logprobs: Sequence[float] | None = None,
        has_choice: Sequence[int] | None = None,
    ) -> None:
        """Append sampled tokens to the current turn.

        `known` is `Turn.policy_logprobs`; `policy_logprobs` belong to "given". `has_choice` is 1 or 0 for each token,
        or None if each of them had an alternative. Raise ValueError if the lengths differ, or if an entry of `logprobs`
        is no finite number: no file could hold it, and no trainer could use it.
        """
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(token_ids)} tokens, {len(logprobs)} logprobs and {len(versions)} versions.")
        if any(value is None or not math.isfinite(value) for value in logprobs):
            raise ValueError("A log-probability is not finite.")
        if (known == "given") != (policy_logprobs is not None):
            raise ValueError(f'Log-probabilities of the policy belong to "given", not to "{known}".')
        policy = [None] * len(token_ids) if known == "unknown" else policy_logprobs or logprobs
        if not len(token_ids) == len(policy) == len(token_ids if has_choice is None else has_choice):
            raise ValueError(f"{len(token_ids)} tokens, {len(policy)} logprobs of the policy, choices: {has_choice}.")
        if known != "same" and not self.policy_logprobs:
            self.policy_logprobs = list(self.logprobs)
        if has_choice is not None and not self.has_choice:
            self.has_choice = list(self.loss_mask)
        if known != "same" or self.policy_logprobs:
            self.policy_logprobs.extend(policy)
        if has_choice is not None or self.has_choice:
            self.has_choice.extend([1] * len(token_ids) if has_choice is None else has_choice)
        self.tokens.extend(token_ids)
        self.loss_mask.extend([1] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.weight_versions.extend(versions)
        turn = self.turns[-1]
        is_first = turn.action_span[0] == turn.action_span[1]
        turn.policy_logprobs = known if is_first else max(turn.policy_logprobs, known, key=_KNOWN.index)
        turn.action_span = (turn.action_span[0], len(self.tokens))

    def action_tokens(self) -> list[int]:
        """Return the tokens that the policy sampled in the current turn."""
        start, end = self.turns[-1].action_span
        return self.tokens[start:end]

    def finish(self, reason: StopReason, error: str | None = None) -> None:
        """Set the stop reason, and the sum of rewards if the end is regular. Later calls change nothing.

        `FaultRules.settle` then sets the fault and the reward of other ends.
        """
        if self.stop_reason is not None:
            return
        self.stop_reason = reason
        self.error = error
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if reason is StopReason.DONE:
            self.reward = sum(rewards) if rewards else None  # no turn had a reward
        elif reason.is_regular:
            self.reward = sum(rewards)


_KNOWN: tuple[PolicyLogprobs, ...] = ("same", "given", "unknown")


def by_episode(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Return the trajectories of each episode, in the order of the episodes' first trajectories.

    The branches of an agent's episode have its group, member and attempt; sub-agents' sessions belong to it. A
    trajectory without a session is an episode of its own.
    """
    episodes: dict[tuple[int, int, int] | int, list[Trajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        place = (trajectory.task.group, trajectory.member, trajectory.attempt) if trajectory.session else number
        episodes.setdefault(place, []).append(trajectory)
    return list(episodes.values())


def is_unsampled(branches: Sequence[Trajectory]) -> bool:
    """Return True if the episode with these branches has a reward or a regular end, and no sampled token."""
    first = branches[0]
    is_regular = first.stop_reason is not None and first.stop_reason.is_regular
    return (is_regular or first.reward is not None) and not any(any(branch.loss_mask) for branch in branches)


class RolloutStats(msgspec.Struct, kw_only=True):
    """Figures of a set of trajectories."""

    trajectories: int
    """Number of trajectories."""
    trainable: int
    """Number of trajectories with a reward and a token to train on."""
    stop_reasons: dict[str, int]
    """Number of trajectories for each stop reason."""
    mean_reward: float | None
    """Mean over the trajectories that have a reward, without those of unsampled episodes."""
    mean_turns: float
    """Mean number of turns."""
    sampled_tokens: int
    """Number of sampled tokens."""
    generate_seconds: float
    """Seconds, summed over the trajectories. The sum exceeds the wall time, because trajectories run side by side."""
    env_seconds: float
    """Sum of the times in which trajectories waited for their environments."""
    unsampled: int
    """Number of episodes that end with a reward or at a limit, and in which the policy sampled no token."""


def summarize(trajectories: Sequence[Trajectory]) -> RolloutStats:
    """Return the figures of a set of trajectories, which may be empty."""
    episodes = by_episode(trajectories)
    unsampled = [branches for branches in episodes if is_unsampled(branches)]
    ignored = {id(t) for branches in unsampled for t in branches}
    rewards = [t.reward for t in trajectories if t.reward is not None and id(t) not in ignored]
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
        unsampled=len(unsampled),
    )


def append_jsonl(path: Path, records: Iterable[Any]) -> None:
    """Append one JSON line for each record (a struct or a dict)."""
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record, enc_hook=jsonable) + b"\n")


def labelled(trajectories: Iterable[Trajectory], **label: Any) -> list[dict[str, Any]]:
    """Return the trajectories as records of `append_jsonl`, each after the keys of `label`."""
    return [label | msgspec.structs.asdict(trajectory) for trajectory in trajectories]


def read_jsonl(path: Path) -> list[Trajectory]:
    """Return the trajectories in a file that `append_jsonl` wrote. Other keys of a line are ignored.

    Raise BadRequestError, which names the line, for a line that is damaged.
    """
    return [read_trajectory(line, where) for where, line in numbered_lines(path)]


def read_trajectory(line: bytes, where: str) -> Trajectory:
    """Return the trajectory of a line.

    Raise BadRequestError, which names `where`, if its lists and spans do not fit its tokens.
    """
    trajectory = decode_json(line, Trajectory, where)
    count = len(trajectory.tokens)
    if count and not 0 <= min(trajectory.tokens) <= max(trajectory.tokens) < 2**31:
        raise BadRequestError(f"{where}: tokens has numbers that are no token ids. Remove the line.")
    for name in ("loss_mask", "logprobs", "weight_versions", "policy_logprobs", "has_choice"):
        found = len(getattr(trajectory, name))
        if found != count and (found or name not in ("policy_logprobs", "has_choice")):
            raise BadRequestError(f"{where}: {name} has {found} entries for {count} tokens. Remove the line.")
    for number, turn in enumerate(trajectory.turns):
        for start, end in (turn.observation_span, turn.action_span):
            if not 0 <= start <= end <= count:
                raise BadRequestError(
                    f"{where}: turn {number} has the span {start}-{end} of {count} tokens. Remove the line."
                )
    return trajectory
