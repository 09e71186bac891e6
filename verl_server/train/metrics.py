"""`StepMetrics`: one line of metrics.jsonl, and the line of the log about the same step.

The trainers make it with `describe_rollout` from the report of all ranks (`rollout_report`). They complete it as the
step goes on: `note_learned` adds what the optimizer steps have learned.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_server.logprob_gap import LogprobGap
from verl_server.train.environment_figures import EnvironmentFigures
from verl_server.train.episode_metrics import metric_means
from verl_server.train.rollout_report import RolloutReport


@dataclass
class Learned:
    """Losses and token counts of the optimizer steps of one training step, over all ranks."""

    losses: dict[str, float]
    """Name -> mean over the optimizer steps of the mean over the sampled tokens (`losses.mean_losses`). The gradient
    norm is the mean over the optimizer steps that were not skipped, and absent if there are none."""
    tokens: int
    """Tokens of the trajectories, counted once for each epoch."""
    padded_tokens: int
    """Tokens of the forward passes: `tokens` and the padding."""
    optimizer_steps: int
    """Optimizer steps that were taken."""
    skipped_optimizer_steps: int = 0
    """Optimizer steps that were not taken, because float16 gradients overflowed."""
    learning_rate: float | None = None
    """Learning rate of the policy in this training step. None if only PPO's critic was trained."""

    @classmethod
    def over(cls, steps: Sequence[Learned]) -> Learned:
        """Return the mean losses and the sums of the counts of several optimizer steps."""
        values: dict[str, list[float]] = {}
        for step in steps:
            for name, value in step.losses.items():
                values.setdefault(name, []).append(value)
        return cls(
            {name: sum(found) / len(found) for name, found in values.items()},
            sum(step.tokens for step in steps),
            sum(step.padded_tokens for step in steps),
            sum(step.optimizer_steps for step in steps),
            sum(step.skipped_optimizer_steps for step in steps),
        )


@dataclass
class StepMetrics:
    """One line of metrics.jsonl. Counts are sums over all ranks, means are over the episodes of all ranks."""

    step: int
    weight_version: str
    """Version of the weights with which the step's trajectories were sampled: NUMBER@INCARNATION. Each start of a run
    (also with `--resume`) is an incarnation of its own."""
    ranks: int
    """Number of trainer ranks."""
    reward: float | None
    """Mean reward of the episodes that have a reward and a sampled token."""
    trajectories: int
    """Number of episodes."""
    failed: int
    """Episodes that failed and that no other one replaced; each is in errors.jsonl. Those of the policy have a reward,
    and are trained on."""
    trainable: int
    """Episodes that have a reward and at least one token to train on."""
    kept: int
    """Episodes that the step learned from: trainable, and for GRPO without a reference policy in groups whose rewards
    differ."""
    stop_reasons: dict[str, int]
    """Stop reason -> number of episodes."""
    turns: float
    """Mean number of turns."""
    sampled_tokens: int
    forced_share: float
    """Share of the sampled tokens that were the only token that a mask (a forced tool call, a grammar) allowed.

    They are not in the loss.
    """
    tokens_per_s: float
    """Sampled tokens per second of rollout."""
    logprob_gap: float | None
    """Largest difference between the server's and the trainer's log-probability of a sampled token, before the step's
    first update, when both hold the same weights. None if no token could be compared."""
    logprob_gap_mean: float | None
    """Mean absolute difference of the same tokens."""
    logprob_kl: float | None
    """Estimate of the KL divergence per token of the same tokens (`LogprobGap.kl`)."""
    rollout_seconds: float
    """Wall time of the rollout on the slowest rank."""
    generate_seconds: float
    """Mean over episodes of the time spent waiting for the server."""
    env_seconds: float
    """Mean over episodes of the time spent waiting for the environment."""
    train_seconds: float = 0.0
    """Time of the optimizer steps, of the comparison for `logprob_gap`, and of the passes for log-probabilities of the
    proximal and the reference policy if there are any."""
    held_seconds: float = 0.0
    """Time for which the push waited for an evaluation, which an older version plays. Asynchronous runs only."""
    sync_seconds: float = 0.0
    """Time of the weight push."""
    trained_tokens: int = 0
    """Tokens of the trajectories that the step learned from, counted once for each epoch of the policy and of PPO's
    critic."""
    padded_tokens: int = 0
    """Tokens of the forward passes: `trained_tokens` and the padding."""
    losses: dict[str, float] = field(default_factory=dict)
    """Loss, entropy, gradient norm, and how far the samples are off-policy: means as in `Learned.losses`. The names are
    in docs/training.md."""
    skipped_optimizer_steps: int = 0
    """Optimizer steps that were not taken, because float16 gradients overflowed. If all of the step's are skipped,
    weights and version stay."""
    learning_rate: float | None = None
    """Learning rate of the policy's optimizer. None if the step did not train the policy."""
    loss_scale: float | None = None
    """Factor of the loss after the step. None if the loss is not scaled, or if the step trained nothing."""
    skipped: str | None = None
    """The reason if the step had nothing to train on; weights and version stay."""
    age: float | None = None
    """Mean age of the episodes: the number of the trained version minus that of an episode's oldest token. Asynchronous
    runs only, as the next three, `waits` and `dropped_groups`."""
    age_max: int | None = None
    """Largest age of an episode."""
    ages: dict[str, int] = field(default_factory=dict)
    """Age -> number of episodes."""
    version_spans: dict[str, int] = field(default_factory=dict)
    """Number of versions that sampled tokens of one episode -> number of episodes."""
    waits: dict[str, float] = field(default_factory=dict)
    """Cause -> seconds that the trainer waited before the step: episodes (too few groups had finished), deadline
    (enough had finished, but an older one must not become too old), servers (those that were lost were brought back).
    """
    idle: dict[str, float] = field(default_factory=dict)
    """trainer, servers -> share of the time since the last step in which it had nothing to do: the trainer waited, or a
    server had no request (mean over the servers that tell). A synchronous run has servers only, as a share of the
    rollout's time."""
    dropped_groups: int = 0
    """Groups that were left out since the last step, because they were too old."""
    success: float | None = None
    """Share of episodes that succeeded, if the caller defines success."""
    unsampled: int = 0
    """Episodes that end with a reward or at a limit, and in which the policy sampled no token. They are in no mean
    reward, and are not trained on."""
    failures: dict[str, int] = field(default_factory=dict)
    """Fault (policy, infrastructure, unknown) -> number of failed episodes, with those that were replaced."""
    replaced: int = 0
    """Episodes that the infrastructure ended and others replaced. They are in errors.jsonl and in no other figure but
    `failures` and `replaced_tokens`."""
    replaced_tokens: float | None = None
    """Mean number of tokens that were sampled in episodes that others replaced. None if there are none."""
    replacing_reward: float | None = None
    """Mean reward of the scored episodes that replaced others. If it differs from `original_reward` over many steps,
    the faults depend on what the policy does."""
    replacing_tokens: float | None = None
    """Mean number of sampled tokens of the same episodes."""
    original_reward: float | None = None
    """Mean reward of the scored episodes that replaced no other one."""
    original_tokens: float | None = None
    """Mean number of sampled tokens of the same episodes."""
    groups: int = 0
    """Groups with a trainable episode."""
    groups_without_spread: int = 0
    """Number of `groups` in which all trainable episodes have the same reward: nothing is learned from the rewards."""
    groups_solved: int = 0
    """Number of `groups_without_spread` whose reward is `reward_max`. 0 if all rewards of the step are equal."""
    groups_unsolved: int = 0
    """Number of `groups_without_spread` whose reward is `reward_min`. 0 if all rewards of the step are equal."""
    refilled_groups: int = 0
    """Groups that played in place of groups without spread (`--grpo.refill`). All of them are among `groups`, and their
    episodes in all figures of episodes. So `groups_without_spread - refilled_groups` had no further group in its place.
    """
    reward_min: float | None = None
    """Lowest reward of a trainable episode."""
    reward_max: float | None = None
    """Highest reward of a trainable episode."""
    truncated: int = 0
    """Episodes that a limit cut: they ended at max_turns, max_tokens or context_full, or `max_new_tokens` cut one of
    their answers. Answers of fewer than 8 tokens are left out, because an action of fixed length ends in this way."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all turns."""
    reusable_tokens: int = 0
    """Number of `prompt_tokens` that an earlier prompt or answer of the episode had, or the first prompt of another
    episode of the group: a prefix cache can have them."""
    cache_hit_rate: float | None = None
    """Share of the prompt tokens that the servers' prefix caches had, since the last step. It counts all requests of
    the servers. None in the first step, and if no server tells."""
    not_finite: list[str] = field(default_factory=list)
    """Names of the figures that were not finite, such as losses.kl. JSON has null in their places."""
    kept_groups: int = 0
    """Groups that an earlier start of the run had played, and that were not played again (docs/checkpoints.md)."""
    environments: dict[str, EnvironmentFigures] = field(default_factory=dict)
    """Environment of a mixture -> its figures (docs/mixtures.md), those that are not None. Absent without a mixture."""
    branches: dict[str, int] = field(default_factory=dict)
    """Kind -> number of branches of an agent's episodes: root and child are conversations, and the other ones are
    changes of their history (`TokenCounts.branches`). {} without an agent."""
    episode_metrics: dict[str, float] = field(default_factory=dict)
    """Name -> mean over the episodes that have it and a sampled token: metrics and scores beside the reward that an
    environment of verifiers computed. {} without one."""
    kept_episodes: int = 0
    """Episodes that had ended in an earlier start of the run, in groups that had not, and that were not played again.
    With `--replay-actions` only, as the next two."""
    replayed_episodes: int = 0
    """Episodes that went on from their last turn in an earlier start of the run: the environment repeated all answers.
    """
    replay_refused: int = 0
    """Episodes that began again from their tasks, because the environment did not repeat the recorded answers."""

    @property
    def phases(self) -> dict[str, float]:
        """Phase -> its seconds, in the order of the phases. `held` is there only if an evaluation held the push."""
        held = {"held": self.held_seconds} if self.held_seconds else {}
        return {"rollout": self.rollout_seconds, "train": self.train_seconds, **held, "sync": self.sync_seconds}


def note_learned(metrics: StepMetrics, learned: Learned, loss_scale: float | None, seconds: float) -> None:
    """Set what the optimizer steps of a step have learned, and their time."""
    metrics.losses = learned.losses
    metrics.trained_tokens, metrics.padded_tokens = learned.tokens, learned.padded_tokens
    metrics.skipped_optimizer_steps = learned.skipped_optimizer_steps
    metrics.learning_rate = learned.learning_rate
    metrics.loss_scale = loss_scale
    metrics.train_seconds = seconds


def describe_rollout(
    report: RolloutReport, *, step: int, version: str, ranks: int, gap: LogprobGap | None
) -> StepMetrics:
    """Return the metrics of a step after its rollout. The fields about training are not set."""
    episodes = max(1, report.episodes)
    return StepMetrics(
        step=step,
        weight_version=version,
        ranks=ranks,
        reward=report.mean_reward,
        trajectories=report.episodes,
        failed=len(report.failures),
        trainable=report.trainable,
        kept=report.kept,
        stop_reasons=report.stop_reasons,
        branches=report.branches,
        episode_metrics=metric_means(report.metrics),
        turns=report.turns / episodes,
        sampled_tokens=report.sampled_tokens,
        forced_share=report.forced_tokens / max(1, report.sampled_tokens),
        tokens_per_s=report.sampled_tokens / max(report.seconds, 1e-9),
        logprob_gap=None if gap is None else gap.largest,
        logprob_gap_mean=None if gap is None else gap.mean,
        logprob_kl=None if gap is None else gap.kl,
        rollout_seconds=report.seconds,
        generate_seconds=report.generate_seconds / episodes,
        env_seconds=report.env_seconds / episodes,
        skipped=report.obstacle(),
        unsampled=report.unsampled,
        failures=dict(Counter(failure.fault for failure in report.failures + report.replaced)),
        replaced=len(report.replaced),
        replaced_tokens=report.lost.mean_tokens,
        replacing_reward=report.replacing.mean_reward,
        replacing_tokens=report.replacing.mean_tokens,
        original_reward=report.original.mean_reward,
        original_tokens=report.original.mean_tokens,
        groups=report.counts.groups,
        groups_without_spread=report.counts.without_spread,
        groups_solved=report.counts.solved,
        groups_unsolved=report.counts.unsolved,
        refilled_groups=report.refilled_groups,
        reward_min=report.counts.lowest,
        reward_max=report.counts.highest,
        truncated=report.counts.truncated,
        prompt_tokens=report.counts.prompt_tokens,
        reusable_tokens=report.counts.reusable_tokens,
        kept_groups=report.kept_groups,
        environments={name: sums.figures() for name, sums in report.environments.items()},
        kept_episodes=report.counts.ended_before,
        replayed_episodes=report.counts.replayed,
        replay_refused=report.counts.replay_refused,
    )


def describe_step(metrics: StepMetrics) -> str:
    """Return a line of text for the log."""
    reward = math.nan if metrics.reward is None else metrics.reward
    gap = "none" if metrics.logprob_gap is None else f"{metrics.logprob_gap_mean:.1e} max {metrics.logprob_gap:.1e}"
    line = (
        f"step {metrics.step:4d}  reward {reward:6.3f}  turns {metrics.turns:4.1f}  "
        f"{metrics.tokens_per_s:6.0f} tok/s  rollout {metrics.rollout_seconds:.2f} s  "
        f"train {metrics.train_seconds:.2f} s  sync {metrics.sync_seconds:.3f} s  "
        f"gap {gap}  {json.dumps(metrics.stop_reasons)}"
    )
    if metrics.environments:
        line += f"  {describe_environments({name: f.reward for name, f in metrics.environments.items()})}"
    if metrics.forced_share:
        line += f"  forced {metrics.forced_share:.0%}"
    if metrics.unsampled:
        line += f"  unsampled {metrics.unsampled} of {metrics.trajectories}"
    if metrics.refilled_groups:
        line += f"  {metrics.refilled_groups} groups refilled"
        if (left := metrics.groups_without_spread - metrics.refilled_groups) > 0:
            line += f", {left} without spread left at the bound of refills"
    if metrics.skipped_optimizer_steps:
        line += f"  {metrics.skipped_optimizer_steps} optimizer step(s) skipped, loss scale {metrics.loss_scale:g}"
    return line if metrics.skipped is None else f"{line}  skipped"


def describe_environments(rewards: Mapping[str, float | None]) -> str:
    """Return the mean rewards of the environments of a mixture as text."""
    return ", ".join(f"{name} {'none' if reward is None else f'{reward:.3f}'}" for name, reward in rewards.items())
