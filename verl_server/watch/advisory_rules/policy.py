"""Rules about the policy: a step that moves it too far, an entropy that collapses, and a reward that is lost again."""

from __future__ import annotations

import math
import statistics

from verl_server.watch.advisory_rules.figures import WINDOW, Finding, Past, Steps, Window

BEHAVIOUR_KL = 1.0
"""Nats per token. Runs of the demo's game that learned had at most 1.0 in any step, at ages up to 8; those that
collapsed had 2.7 and more (docs/async-training.md). A real model that learns well has far less, 0.001 to 0.1."""
ENTROPY_SHARE = 0.1
"""Share of the entropy of the first steps. A policy with a tenth of it samples nearly the same answer each time."""
GAIN = 0.5
"""Share of the way from the reward of the first steps to the best reward of an episode, which the mean reward must have
gone: a policy trades its entropy for reward, and one that solves its task needs none. The demo's game ends at 0.8 of
the way, with a twelfth of its entropy."""

KEPT_REWARD = 0.5
"""Share of the best mean reward, above the lowest reward of an episode. SmolLM2-135M on the game of sums: 12 runs fell
below it and ended between 0.00 and 0.30, and the 11 runs that learned kept 0.75 and more (docs/experiments.md)."""


def behaviour_kl(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge how far a step moves the policy from the one that sampled."""
    values = [step.loss("behaviour_kl") for step in steps]
    figure = statistics.median(values)
    if figure <= level * BEHAVIOUR_KL:
        return None
    ages = [step.age for step in steps if step.age is not None]
    clipped = [step.losses.get("clip_fraction") for step in steps]
    shares = [share for share in clipped if share is not None]
    old = f"; the episodes are {statistics.fmean(ages):.2g} versions old on average" if ages else ""
    clip = f", {statistics.median(shares):.0%} of the tokens are clipped" if shares else ""
    return Finding(
        figure=figure,
        bound=BEHAVIOUR_KL,
        message=f"the trained policy is {figure:.2g} nats per token from the one that sampled (behaviour_kl, median of "
        f"{len(steps)} steps){clip}{old}",
        cause=f"the learning rate{_rate(past)} is too high, or there are too many optimizer steps for each batch"
        + (", or the episodes are too old for the loss" if ages and statistics.fmean(ages) >= 1 else ""),
        remedy="Divide --grpo.learning-rate by 10, and continue from a checkpoint before the jump; or lower "
        "--grpo.epochs and --grpo.minibatches" + (", or --max-staleness." if ages else "."),
        severity="error",
    )


def entropy_collapse(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge a low entropy without a gain in reward (DAPO, Yu et al. 2025, arXiv 2503.14476, and Cui
    et al. 2025, arXiv 2505.22617, describe it)."""
    figure, first = statistics.median(step.loss("entropy") for step in steps), past.first_entropy
    bound = ENTROPY_SHARE * first
    rewards = [step.reward for step in steps if step.reward is not None]
    if figure >= bound / level or not rewards:
        return None
    reward, first_reward = statistics.median(rewards), past.first_reward
    if reward > first_reward and reward - first_reward >= GAIN * (past.highest - first_reward):
        return None
    return Finding(
        figure=figure,
        bound=bound,
        message=f"the entropy fell to {figure:.2g} nats per token, from {first:.2g} in the first steps, and the "
        f"median reward is {reward:.3g} (first steps {first_reward:.3g}, best episode {past.highest:.3g})",
        cause=f"the policy has settled on one answer too early: a learning rate{_rate(past)} that is too high, a "
        "reward that one answer always gets in part, or many steps over few tasks",
        remedy="Continue from an earlier checkpoint with a lower --grpo.learning-rate, a larger --grpo.clip-high, or "
        "--grpo.entropy-coef above 0.",
        severity="error",
    )


def reward_collapse(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge a mean reward that has fallen far below its best: what the policy had learned is lost.

    Other rules say why, if their figures show it; a policy may also collapse with a small KL in each step. The fall has
    to exceed three standard errors, since the mean of few episodes varies.
    """
    now, best = Window.of([step.reward for step in steps if step.reward is not None], steps[-1].step), past.best
    if best is None:
        return None
    gain = KEPT_REWARD * (best.mean - past.lowest)
    error = math.sqrt((now.deviation**2 + best.deviation**2) / WINDOW)
    if now.mean - past.lowest >= gain / level or best.mean - now.mean <= level * 3 * error:
        return None
    return Finding(
        figure=now.mean,
        bound=past.lowest + gain,
        message=f"the reward fell to {now.mean:.3g} (mean of {WINDOW} steps), from {best.mean:.3g} in the "
        f"{WINDOW} steps up to step {best.last}",
        cause=f"the updates have destroyed what the policy had learned: the learning rate{_rate(past)} is too high, "
        "the episodes are too old for the loss, or the loss has no clip; or the tasks have become harder, or the "
        "environment is broken",
        remedy="Read episodes of before and after the fall. Continue from a checkpoint before it with a lower "
        "--grpo.learning-rate, or with --grpo.loss clip_behaviour.",
        severity="error",
    )


def _rate(past: Past) -> str:
    """Return the learning rate of the run in brackets, "" if it is not known."""
    rate = past.settings.learning_rate
    return "" if rate is None else f" ({rate:g})"
