"""`RolloutReport`: what the episodes of a step were, as sums of one rank or of all.

Each rank describes its own episodes in a report. The ranks exchange the reports, and every rank merges them to the same
totals, so that all ranks decide alike whether the step has something to train on. `metrics.describe_rollout` makes the
step's line of metrics.jsonl from the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from verl_server.rollout.faults import fault_of
from verl_server.rollout.token_counts import branch_kinds
from verl_server.rollout.trajectory import StopReason, Trajectory, by_episode, is_unsampled
from verl_server.rollout.unsampled import is_too_long, remedy
from verl_server.train.environment_figures import EnvironmentSums, added, sums_by_environment
from verl_server.train.episode_counts import EpisodeCounts, has_failed
from verl_server.train.episode_metrics import MetricSum, merge_sums, metric_sums
from verl_server.train.mixture import Mixture

_SERVER_FAILED = (
    StopReason.GENERATION_ERROR,
    StopReason.GENERATION_TIMEOUT,
    StopReason.SESSION_LOST,
    StopReason.ABORTED,
)


class Failure(msgspec.Struct, kw_only=True):
    """An episode that failed: it did not end by the environment or at a limit; one line of errors.jsonl."""

    step: int
    rank: int
    url: str
    """URL of the environment server, or of the rollout server if it failed, aborted the generation or lost the
    session."""
    stop_reason: str
    error: str
    seed: int
    group: int
    episode_id: str | None
    turns: int
    """Number of turns that the episode had begun."""
    fault: str
    """The party that caused the end: policy, infrastructure or unknown."""
    attempt: int = 0
    """Number of episodes that were replaced before this one in the same place of the group."""
    replaced: bool = False
    """True if another episode took the place of this one."""
    environment: str | None = None
    """Name of the environment in a mixture. None: there is one only."""


class Means(msgspec.Struct):
    """Sums of a kind of episodes, whose means can be merged."""

    episodes: int = 0
    reward: float = 0.0
    tokens: int = 0
    """Sampled tokens."""

    def __add__(self, other: Means) -> Means:
        return Means(self.episodes + other.episodes, self.reward + other.reward, self.tokens + other.tokens)

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.episodes if self.episodes else None

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.episodes if self.episodes else None

    @staticmethod
    def of(episodes: Sequence[Sequence[Trajectory]]) -> Means:
        """Return the sums of `episodes`, each of which is its branches."""
        rewards = sum(branches[0].reward or 0.0 for branches in episodes)
        return Means(len(episodes), rewards, sum(t.sampled_tokens for branches in episodes for t in branches))


class RolloutReport(msgspec.Struct, kw_only=True):
    """Sums over the episodes of one rank, or of all ranks once they are merged."""

    episodes: int = 0
    scored: int = 0
    """Episodes that have a reward and a sampled token."""
    unsampled: int = 0
    """Episodes that end with a reward or at a limit, and have no sampled token."""
    too_long: int = 0
    """Unsampled episodes whose first prompt does not fit."""
    reward: float = 0.0
    """Sum of the rewards of the scored episodes."""
    by_agent: bool = False
    """True if an agent plays the episodes."""
    trainable: int = 0
    """Scored episodes with at least one token to train on."""
    kept: int = 0
    """Trainable episodes that the step learns from; for GRPO those of groups whose rewards differ."""
    turns: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    """Sampled tokens that were the only token that a mask allowed. They are not in the loss."""
    generate_seconds: float = 0.0
    """Time spent waiting for the server, summed over the episodes."""
    env_seconds: float = 0.0
    """Time spent waiting for the environment, summed over the episodes."""
    seconds: float = 0.0
    """Wall time of the rollout. After a merge, it is the time of the slowest rank."""
    stop_reasons: dict[str, int] = {}
    branches: dict[str, int] = {}
    """Kind -> number of branches of an agent's episodes (`TokenCounts.branches`). {} without an agent."""
    metrics: dict[str, MetricSum] = {}
    """Name -> sum of a metric that the agent's own code computed. {} without such code."""
    failures: list[Failure] = []
    """The failed episodes that no other one replaced."""
    replaced: list[Failure] = []
    """The failed episodes that others replaced. They are in no other figure but `lost`."""
    lost: Means = msgspec.field(default_factory=Means)
    """The episodes that others replaced."""
    replacing: Means = msgspec.field(default_factory=Means)
    """The scored episodes that replaced others."""
    original: Means = msgspec.field(default_factory=Means)
    """The scored episodes that replaced no other one."""
    counts: EpisodeCounts = msgspec.field(default_factory=EpisodeCounts)
    kept_groups: int = 0
    """Groups that an earlier start of the run played."""
    environments: dict[str, EnvironmentSums] = {}
    """Environment of a mixture -> its part of these sums. {} without a mixture."""
    refilled_groups: int = 0
    """Groups that played in place of others without spread."""

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.scored if self.scored else None

    def describe_unsampled(self) -> str:
        """Return a text about the number of unsampled episodes, their likely causes and the remedies."""
        causes = [remedy(too_long=True, agent=self.by_agent)] if self.too_long else []
        if self.unsampled > self.too_long:
            causes.append(remedy(too_long=False, agent=self.by_agent))
        return f"in {self.unsampled} of {self.episodes} episodes the policy sampled no token. {'. '.join(causes)}"

    def obstacle(self) -> str | None:
        """Return the reason why there is nothing to train on, with the counts of errors; None if there is something."""
        if self.kept:
            return None
        failed = f"{len(self.failures)} of {self.episodes} episodes failed: {count_errors(self.failures)}"
        if len(self.failures) == self.episodes:
            return failed
        if not self.trainable:
            forced = f"; {self.forced_tokens} of {self.sampled_tokens} sampled tokens were forced by masks"
            reason = (
                f"no episode has both a reward and a token to train on (ends: {self.stop_reasons}"
                f"{forced if self.forced_tokens else ''})"
            )
        else:
            reason = (
                f"in no group did the rewards differ ({self.scored} episodes have a reward, {self.mean_reward:.4g} "
                "on average)"
            )
            if self.refilled_groups:
                reason = f"{reason}, nor in {self.refilled_groups} further groups that replaced them"
        if self.unsampled:
            reason = f"{reason}; {self.describe_unsampled()}"
        return f"{reason}; {failed}" if self.failures else reason


def report_rollout(
    trajectories: Sequence[Trajectory],
    kept: int,
    seconds: float,
    *,
    step: int,
    rank: int,
    env_url: str,
    server_url: str,
    by_agent: bool = False,
    replaced: Sequence[Trajectory] = (),
    kept_groups: int = 0,
    mixture: Mixture | None = None,
) -> RolloutReport:
    """Return the report of this rank's episodes. `kept` is the number of episodes that the step learns from.

    `replaced` are the episodes that others replaced, and `kept_groups` is the number of groups that an earlier start of
    the run played. `mixture` has the environments that tasks name. The branches of an agent's episode count as one
    episode. An error of an episode with a reward and a regular end is no failure: a limit of its session may have ended
    the agent with an exception.
    """
    episodes = by_episode(trajectories)
    firsts = [branches[0] for branches in episodes]
    unsampled = [branches[0] for branches in episodes if is_unsampled(branches)]
    scored = [b for b in episodes if b[0].reward is not None and not is_unsampled(b)]

    def failure(t: Trajectory, replaced: bool) -> Failure:
        assert t.stop_reason is not None
        return Failure(
            step=step,
            rank=rank,
            url=server_url if t.stop_reason in _SERVER_FAILED else _environment_url(t, mixture) or env_url,
            stop_reason=str(t.stop_reason),
            error=t.error or str(t.stop_reason),
            seed=t.task.seed,
            group=t.task.group,
            episode_id=t.task.episode_id,
            turns=len(t.turns),
            fault=str(fault_of(t.stop_reason, t.fault)),
            attempt=t.attempt,
            replaced=replaced,
            environment=t.task.environment,
        )

    lost = by_episode(replaced)
    return RolloutReport(
        episodes=len(episodes),
        scored=len(scored),
        unsampled=len(unsampled),
        too_long=sum(is_too_long(t.stop_reason) for t in unsampled),
        by_agent=by_agent,
        reward=sum(b[0].reward or 0.0 for b in scored),
        trainable=sum(any(t.is_trainable for t in branches) for branches in episodes),
        kept=kept,
        turns=sum(len(t.turns) for t in trajectories),
        sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        forced_tokens=sum(t.forced_tokens for t in trajectories),
        generate_seconds=sum(t.seconds("generate") for t in trajectories),
        env_seconds=sum(t.seconds("env") for t in trajectories),
        seconds=seconds,
        stop_reasons=dict(Counter(str(t.stop_reason) for t in firsts)),
        branches=dict(Counter(kind for b in episodes if b[0].session for kind in branch_kinds(b))),
        metrics=metric_sums(episodes),
        failures=[failure(t, False) for t in firsts if has_failed(t)],
        replaced=[failure(branches[0], True) for branches in lost],
        lost=Means.of(lost),
        replacing=Means.of([b for b in scored if b[0].attempt]),
        original=Means.of([b for b in scored if not b[0].attempt]),
        counts=EpisodeCounts.of(episodes),
        kept_groups=kept_groups,
        environments=sums_by_environment(mixture, trajectories, replaced),
    )


def _environment_url(t: Trajectory, mixture: Mixture | None) -> str | None:
    return None if mixture is None or t.task.environment is None else mixture[t.task.environment].url


def merge_reports(reports: Sequence[RolloutReport]) -> RolloutReport:
    """Return the sums of the ranks' reports."""
    reasons: Counter[str] = Counter()
    branches: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.stop_reasons)
        branches.update(report.branches)
    return RolloutReport(
        episodes=sum(r.episodes for r in reports),
        scored=sum(r.scored for r in reports),
        unsampled=sum(r.unsampled for r in reports),
        too_long=sum(r.too_long for r in reports),
        by_agent=any(r.by_agent for r in reports),
        reward=sum(r.reward for r in reports),
        trainable=sum(r.trainable for r in reports),
        kept=sum(r.kept for r in reports),
        turns=sum(r.turns for r in reports),
        sampled_tokens=sum(r.sampled_tokens for r in reports),
        forced_tokens=sum(r.forced_tokens for r in reports),
        generate_seconds=sum(r.generate_seconds for r in reports),
        env_seconds=sum(r.env_seconds for r in reports),
        seconds=max(r.seconds for r in reports),
        stop_reasons=dict(reasons.most_common()),
        branches=dict(branches.most_common()),
        metrics=merge_sums([r.metrics for r in reports]),
        failures=[failure for r in reports for failure in r.failures],
        replaced=[failure for r in reports for failure in r.replaced],
        lost=sum((r.lost for r in reports), Means()),
        replacing=sum((r.replacing for r in reports), Means()),
        original=sum((r.original for r in reports), Means()),
        counts=sum((r.counts for r in reports), EpisodeCounts()),
        kept_groups=sum(r.kept_groups for r in reports),
        environments=added([r.environments for r in reports]),
        refilled_groups=sum(r.refilled_groups for r in reports),
    )


def count_errors(failures: Sequence[Failure], most: int = 3) -> str:
    """Return the `most` most frequent errors as "12 x <error>; 3 x ...", with the URL if an error does not name it.

    An error in a mixture begins with the name of the environment.
    """
    counts = Counter(_with_url(failure) for failure in failures).most_common()
    shown = "; ".join(f"{count} x {error.rstrip('.')}" for error, count in counts[:most])
    more = len(counts) - most
    return f"{shown}; and {more} other error(s)" if more > 0 else shown


def _with_url(failure: Failure) -> str:
    address = failure.url.partition("://")[2] or failure.url
    error = failure.error if address in failure.error else f"{failure.url}: {failure.error}"
    return error if failure.environment is None else f"{failure.environment}: {error}"
