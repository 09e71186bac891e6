"""`RULES`: the rules that judge each step of a run, by the names that `--stop-on` and the events have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verl_server.watch.advisory_rules.episodes import failed, truncated, without_spread
from verl_server.watch.advisory_rules.figures import WINDOW, Finding, Past, StepFigures, Steps
from verl_server.watch.advisory_rules.finite import non_finite
from verl_server.watch.advisory_rules.policy import behaviour_kl, entropy_collapse, reward_collapse
from verl_server.watch.advisory_rules.seconds import PHASE_STEPS, cache_hits, servers_idle, slow_phase, trainer_idle


class Judge(Protocol):
    def __call__(self, steps: Steps, past: Past, level: float = 1.0) -> Finding | None:
        """Judge the last steps that have the figures, the newest last.

        `level` is the share of the bound from which on a figure is found; of a bound from below, its inverse.
        """


@dataclass(frozen=True)
class Rule:
    name: str
    about: str
    """What it finds, for the help of `--stop-on`."""
    has: Callable[[StepFigures], bool]
    """True if a step has the figures of the rule."""
    judge: Judge
    least: int = 3
    """Steps that it needs."""
    most: int = 5
    """Steps that it looks at."""


RULES = (
    Rule("failed", "more than 5 % of the episodes failed", lambda s: s.trajectories + s.replaced > 0, failed),
    Rule("truncated", "limits cut more than a quarter of the episodes", lambda s: s.trajectories > 0, truncated),
    Rule(
        "groups_without_spread",
        "more than half of the groups have equal rewards",
        lambda s: s.trainable > 0,
        without_spread,
    ),
    Rule("behaviour_kl", "a step moves the policy too far", lambda s: "behaviour_kl" in s.losses, behaviour_kl),
    Rule(
        "entropy_collapse",
        "the entropy is below a tenth of that of the first steps, and the reward is not at its best",
        lambda s: s.losses.get("entropy") is not None,
        entropy_collapse,
    ),
    Rule(
        "reward_collapse",
        "the reward has fallen below half of its best",
        lambda s: s.reward is not None,
        reward_collapse,
        least=WINDOW,
        most=WINDOW,
    ),
    Rule("trainer_idle", "the trainer waits more than half of the time", lambda s: "trainer" in s.idle, trainer_idle),
    Rule("servers_idle", "the servers wait more than half of the time", lambda s: "servers" in s.idle, servers_idle),
    Rule(
        "cache_hits",
        "the prefix caches have less than half of what they could",
        lambda s: s.cache_hit_rate is not None and s.prompt_tokens > 0,
        cache_hits,
    ),
    Rule(
        "slow_phase",
        "a phase takes six times its median",
        lambda s: bool(s.phases),
        slow_phase,
        least=PHASE_STEPS + 1,
        most=21,
    ),
    Rule("non_finite", "a loss, a reward or a gap is not finite", lambda s: True, non_finite, least=1, most=1),
)
"""All rules but that of the gap, which `advisories` judges before a step trains."""
