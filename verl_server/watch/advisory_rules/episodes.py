"""Rules about episodes and groups: failures, limits that cut them, and groups whose rewards are equal."""

from __future__ import annotations

import statistics

from verl_server.watch.advisory_rules.figures import (
    Finding,
    Past,
    StepFigures,
    Steps,
    describe_counts,
    surely,
    totals,
)
from verl_server.watch.run_records import Severity

FAILED_SHARE = 0.05
"""Failures are a selection: what fails is rarely a random part of the tasks. Sandboxes and servers that are well lose
below one percent."""
TRUNCATED_SHARE = 0.25
"""An episode that was cut has the reward of an unfinished one, so the policy learns to be short, not to be right."""
WITHOUT_SPREAD_SHARE = 0.5
"""Such groups have no advantage. With more than half of them, a step costs twice what it learns from."""
_GROUP = 8
"""Episodes that count as one group in lines of earlier versions: they do not have independent rewards."""
_INFO: Severity = "info"
_WARNING: Severity = "warning"
_REGULAR = ("done", "max_turns", "max_tokens", "context_full")
_LIMITS = {
    "max_turns": "--max-turns",
    "max_tokens": "--max-tokens",
    "context_full": "--server.context-length (or the server's KV cache)",
}


def failed(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge episodes that failed, with those that others replaced: they cost as much, and are no random part."""
    count = sum(step.failed + step.replaced for step in steps)
    episodes = sum(step.trajectories + step.replaced for step in steps)
    if surely(count, episodes) <= level * FAILED_SHARE:
        return None
    faults = totals(step.failures for step in steps)
    ends = totals({k: n for k, n in step.stop_reasons.items() if k not in _REGULAR} for step in steps)
    replaced = sum(step.replaced for step in steps)
    environments = totals({n: e.failed + e.replaced for n, e in step.environments.items()} for step in steps)
    where = describe_counts({name: number for name, number in environments.items() if number})
    which = f"; by environment: {where}" if where else ""
    shown = ", ".join(part for part in (describe_counts(ends), f"{replaced} replaced" if replaced else "") if part)
    fault = max(faults, key=lambda name: faults[name], default="infrastructure")
    causes = {
        "infrastructure": "the environment server, a tool or the rollout server fails or is away",
        "policy": "actions of the policy are refused, episodes reach their time limit, or the agent's program raises",
        "unknown": "answers of the server take too long, stragglers are ended, or a signal ended the agent",
    }
    return Finding(
        figure=count / episodes,
        bound=FAILED_SHARE,
        message=f"{count} of {episodes} episodes failed in the last {len(steps)} steps ({shown}), by fault: "
        f"{describe_counts(faults) or 'not recorded'}{which}",
        cause=causes.get(fault, causes["infrastructure"]),
        remedy="Look at the most frequent error in errors.jsonl, which has the URL, the seed and the message of each: "
        "play its seed alone, and read the log of the server that it names. If an end is the policy's in your "
        "environment, say so with --fault.",
        severity="error" if count / episodes > 0.5 else "warning",
    )


def truncated(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge episodes that limits cut. Lines of earlier versions tell those whose end is a limit only."""
    count, episodes = sum(map(_cut, steps)), sum(step.trajectories for step in steps)
    if surely(count, episodes) <= level * TRUNCATED_SHARE:
        return None
    ends = totals({k: n for k, n in step.stop_reasons.items() if k in _LIMITS} for step in steps)
    answers = count - sum(ends.values())
    shown = ", ".join(filter(None, (describe_counts(ends), f"cut answers {answers}" if answers > 0 else "")))
    worst = max(ends, key=lambda name: ends[name], default="answers")
    if answers > ends.get(worst, 0):
        worst = "answers"
    return Finding(
        figure=count / episodes,
        bound=TRUNCATED_SHARE,
        message=f"limits cut {count} of {episodes} episodes in the last {len(steps)} steps ({shown})",
        cause="the limit is too small for the task, or the policy does not end its answers: it repeats itself, or has "
        "learned that long answers pay",
        remedy=f"Read some of them, then raise {_LIMITS.get(worst, '--max-new-tokens')}, or reward short answers.",
    )


def without_spread(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge groups whose rewards are equal. Without their number, the share of the episodes in them stands for it."""
    if all(step.groups is not None for step in steps):
        count, total = sum(step.groups_without_spread for step in steps), sum(step.groups or 0 for step in steps)
        share, of = surely(count, total), "groups"
    else:
        count, total = sum(step.trainable - step.kept for step in steps), sum(step.trainable for step in steps)
        share, of = surely(count // _GROUP, total // _GROUP), "episodes"
    if share <= level * WITHOUT_SPREAD_SHARE:
        return None
    reward = statistics.fmean(step.reward or 0.0 for step in steps)
    lows, highs = [s.reward_min for s in steps], [s.reward_max for s in steps]
    known = [value for value in (*lows, *highs, *(s.reward for s in steps)) if value is not None]
    if known and max(known) - min(known) < 1e-9 and count == total:
        return Finding(
            figure=1.0,
            bound=WITHOUT_SPREAD_SHARE,
            message=f"every episode of the last {len(steps)} steps has the reward {reward:g}, so nothing is learned",
            cause="the reward does not depend on what the policy does: the environment or the reward function returns "
            "a constant, reads another field than the answer, or the task is far too hard or solved",
            remedy="Play one episode by hand, and look at what the environment returns for a right and for a wrong "
            "answer; then read the policy's answers in a few episodes.",
            severity="error",
        )
    if all(step.kept == step.trainable for step in steps):
        return None  # the steps learned from all episodes, as PPO does, which compares none within a group
    if any(low is None for low in lows):
        cause, remedy, severity = "the tasks are too easy or too hard for the policy", "Look at its rewards.", _WARNING
    elif past.highest - reward < reward - past.lowest:
        cause, severity = "the tasks have become easy for the policy", _INFO
        remedy = "Train on harder tasks, or end the run."
    else:
        cause = "the tasks are too hard for the policy, or the reward is too coarse to tell its answers apart"
        remedy = "Train on easier tasks, enlarge --grpo.group-size, or pay for parts of the way."
        severity = _WARNING
    if not any(step.refilled_groups for step in steps):
        remedy += " --grpo.refill plays other groups in their place."
    return Finding(
        figure=count / total,
        bound=WITHOUT_SPREAD_SHARE,
        message=f"in {count} of {total} {of} of the last {len(steps)} steps the rewards of the group are all equal "
        f"(mean reward {reward:.3g})",
        cause=cause,
        remedy=remedy,
        severity=severity,
    )


def _cut(step: StepFigures) -> int:
    if step.truncated is not None:
        return step.truncated
    return sum(step.stop_reasons.get(reason, 0) for reason in _LIMITS)
