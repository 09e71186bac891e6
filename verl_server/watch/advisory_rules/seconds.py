"""Rules about time: who waits, prompts that are computed again, and a phase that takes much longer than before."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from verl_server.watch.advisory_rules.figures import Finding, Past, Steps, totals

IDLE_SHARE = 0.5
HIT_SHARE = 0.5
"""Of the prompt tokens that a prefix cache can have. Episodes that wait for each other, and a push in the middle, cost
some of them, but not half."""
LONG_PROMPT = 256
"""Mean tokens of a prompt from which on cache hits are judged. Shorter ones cost little, and a cache keeps whole pages
only."""
SLOW_FACTOR = 6.0
SLOW_SECONDS = 5.0
"""Least excess of a slow phase over its median. Phases of milliseconds vary sixfold by chance."""
SLOW_SHARE = 0.25
"""Least excess of a slow phase, as a share of a step."""


def trainer_idle(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge asynchronous runs only: in a synchronous one, the trainer waits for each rollout."""
    figure = statistics.median(step.idle["trainer"] for step in steps)
    if figure <= level * IDLE_SHARE:
        return None
    waits = totals(step.waits for step in steps)
    shown = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in waits.items() if seconds >= 0.05)
    worst = max(waits, key=lambda cause: waits[cause], default="episodes")
    causes = {
        "episodes": "rollouts are slower than training",
        "deadline": "a few slow groups would become too old, and the step waits for them",
        "servers": "rollout servers were lost and brought back",
    }
    servers = [step.idle["servers"] for step in steps if "servers" in step.idle]
    waiting = bool(servers) and statistics.median(servers) > IDLE_SHARE
    remedies = {
        "episodes": "The servers are idle, too, so the environment is the bottleneck: speed it up, or play more "
        "episodes at once (--max-concurrency, --grpo.groups, --max-staleness)."
        if waiting
        else _MORE_ROLLOUT[past.settings.shares_gpu],
        "deadline": "Raise --max-staleness, bound slow episodes (--trajectory-timeout), or use --stale drop.",
        "servers": "Read the servers' logs: events.jsonl has the times at which they were lost.",
    }
    return Finding(
        figure=figure,
        bound=IDLE_SHARE,
        message=f"the trainer waited for {figure:.0%} of the time (median of {len(steps)} steps)"
        + (f": {shown}" if shown else ""),
        cause=causes.get(worst, causes["episodes"]),
        remedy=remedies.get(worst, remedies["episodes"]),
    )


def servers_idle(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge the time without a request: that of the rollouts in a synchronous run, else all of it.

    It is no fault of a synchronous run: one of trainer and servers always waits there, and small models are fast. It is
    none either where the trainer computes on the servers' GPU meanwhile.
    """
    figure = statistics.median(step.idle["servers"] for step in steps)
    if figure <= level * IDLE_SHARE:
        return None
    is_async = any("trainer" in step.idle for step in steps)
    trains = is_async and statistics.median(step.idle.get("trainer", 0.0) for step in steps) <= IDLE_SHARE
    if trains:
        cause = "training is slower than the rollouts, and no group may start before it goes on"
        remedy = _FASTER_TRAINING[past.settings.shares_gpu]
    else:
        cause = "episodes wait for the environment, or too few of them play at once"
        remedy = "Play more episodes at once (--grpo.groups, --max-concurrency), speed the environment up, or let " + (
            "groups start earlier (--max-staleness)." if is_async else _PLAY_MEANWHILE
        )
    return Finding(
        figure=figure,
        bound=IDLE_SHARE,
        message=f"the rollout servers had no request for {figure:.0%} of the time"
        f"{'' if is_async else ' in which episodes play'} (median of {len(steps)} steps)",
        cause=cause,
        remedy=remedy,
        severity="info" if not is_async or (trains and past.settings.shares_gpu) else "warning",
    )


def cache_hits(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Compare what the prefix caches had with what they could have: histories, and first prompts of a group."""
    prompts = sum(step.prompt_tokens for step in steps)
    calls = sum(step.turns * step.trajectories for step in steps)
    could = sum(step.reusable_tokens for step in steps) / prompts
    figure = statistics.median(step.cache_hit_rate or 0.0 for step in steps)
    if prompts < LONG_PROMPT * calls or could < HIT_SHARE or figure >= HIT_SHARE * could / level:
        return None
    return Finding(
        figure=figure,
        bound=HIT_SHARE * could,
        message=f"the prefix caches had {figure:.0%} of the prompt tokens (median of {len(steps)} steps), and the "
        f"episodes' histories are {could:.0%} of them",
        cause="the KV cache is too small for the episodes that play at once, prefix caching is off, prompts change at "
        "their begin (a date, a random order), or turns of an episode reach several servers",
        remedy="Enlarge the KV cache or lower --max-concurrency, look at cache_hit_rate and token_usage in "
        "/server_info, and keep what changes at the end of prompts.",
    )


def slow_phase(steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
    """Judge the newest step: a phase that took six times its median, and a good part of a step."""
    *before, now = steps
    usual = statistics.median(sum(step.phases.values()) for step in before)
    worst: tuple[float, str, float] | None = None
    for name, seconds in now.phases.items():
        known = [value for step in before if (value := step.phases.get(name, 0.0)) > 0]  # a skipped step trains nothing
        if len(known) < PHASE_STEPS:
            continue
        median = statistics.median(known)
        is_slow = seconds > level * SLOW_FACTOR * median and seconds - median > max(SLOW_SECONDS, SLOW_SHARE * usual)
        if is_slow and (worst is None or seconds / median > worst[0]):
            worst = (seconds / median, name, seconds)
    if worst is None:
        return None
    factor, name, seconds = worst
    return Finding(
        figure=factor,
        bound=SLOW_FACTOR,
        message=f"the phase {name} took {seconds:.1f} s, {factor:.0f} times its median of {seconds / factor:.2g} s",
        cause=_PHASES.get(name, ("something held the step up",))[0],
        remedy=_PHASES.get(name, ("", "Look at the events of the step."))[1],
    )


_MORE_ROLLOUT: Mapping[bool, str] = {
    True: "Trainer and server share a GPU: give the episodes more of its memory (--server.mem-fraction-static), or "
    "play them on servers of other GPUs (--server may be repeated).",
    False: "Give the rollouts more servers (--server may be repeated), or a larger part of the GPUs.",
}
"""Whether trainer and servers are known to share a GPU -> what makes rollouts faster."""
_FASTER_TRAINING: Mapping[bool, str] = {
    True: "Nothing is lost: the trainer computes on the server's GPU meanwhile, and training is the larger part of the "
    "work. For shorter steps, raise --grpo.micro-batch-tokens, lower --grpo.epochs, or play the episodes on servers of "
    "other GPUs (--server).",
    False: "If the servers have GPUs of their own, give some of them to the trainer. If they share the trainer's, "
    "nothing is lost, because training is the larger part of the work.",
}
"""As `_MORE_ROLLOUT` -> what a run does whose training takes longer than its rollouts."""
_PLAY_MEANWHILE = "episodes play while the trainer trains (verl_server.train.async_grpo)."
PHASE_STEPS = 8
"""Steps of which a phase must be known before a step is compared with them."""
_PHASES: Mapping[str, tuple[str, str]] = {
    "rollout": (
        "an episode or a server hung, a server was brought back, or one task is much longer than the others",
        "Look at the longest episode of the step, and at the events server_lost and server_healed. "
        "--trajectory-timeout and --straggler-timeout bound slow episodes.",
    ),
    "train": (
        "much longer episodes than before, a compilation, or another program on the same processors",
        "Compare trained_tokens and padded_tokens with the steps before, and look for other programs.",
    ),
    "sync": (
        "a server was away or busy during the push, or had to be brought back",
        "Look at push_ended and server_lost in events.jsonl, and at the server's log of that time.",
    ),
    "record": ("the disk of the run is slow or nearly full", "Look at the disk, or write to another one with --out."),
}
