"""Steps and evaluations to log."""

from __future__ import annotations

import itertools
from typing import Any

from verl_server.train.metrics import StepMetrics
from verl_server.train.trackers.names import CRITIC_LOSSES, STEP_FIGURES, STEP_GROUPS


def step_metrics(step: int, reward: float | None = 0.5, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "weight_version": f"{step}@aa",
        "ranks": 1,
        "reward": reward,
        "trajectories": 8,
        "failed": 1,
        "trainable": 7,
        "kept": 6,
        "stop_reasons": {"done": 7, "env_error": 1},
        "turns": 2.5,
        "sampled_tokens": 100,
        "forced_share": 0.25,
        "tokens_per_s": 12.5,
        "logprob_gap": 2e-5,
        "logprob_gap_mean": 1e-5,
        "logprob_kl": 1e-9,
        "rollout_seconds": 1.5,
        "generate_seconds": 0.5,
        "env_seconds": 0.75,
        "losses": {"loss": float("nan"), "behaviour_kl": 0.125 * step},
    }
    return StepMetrics(**(values | changes))


def full_step(step: int) -> StepMetrics:
    """Return a step in which each field has a value, also the optional ones, and no two figures are equal."""
    metrics = step_metrics(step)
    values = (number + step / 8 for number in itertools.count(1))
    for field in STEP_FIGURES.values():
        setattr(metrics, field, next(values))
    for field in STEP_GROUPS.values():
        setattr(metrics, field, {"one": next(values), "two": next(values)})
    metrics.losses |= {key: next(values) for key in CRITIC_LOSSES.values()}
    return metrics


def evaluation(step: int, reward: float = 0.5, **changes: Any) -> dict[str, Any]:
    figures = {"reward": reward, "success": 0.25, "episodes": 4, "failed": 0, "seconds": 1.5, "push_delay": 0.5}
    return {"step": step, "version": f"{step}@aa"} | figures | changes
