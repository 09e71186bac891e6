"""The names that a training run's figures have in trackers, equal for every trainer and every tracker.

`Trackers` makes figures of a step's metrics and of an evaluation's record with these tables. docs/trackers.md lists the
names, and a test compares the page with the tables. A name never changes its meaning: dashboards and scripts of users
depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.train.metrics import StepMetrics

STEP_FIGURES = {
    "reward/mean": "reward",
    "reward/min": "reward_min",
    "reward/max": "reward_max",
    "reward/success": "success",
    "reward/original": "original_reward",
    "reward/replacing": "replacing_reward",
    "episodes/count": "trajectories",
    "episodes/trainable": "trainable",
    "episodes/kept": "kept",
    "episodes/failed": "failed",
    "episodes/replaced": "replaced",
    "episodes/unsampled": "unsampled",
    "episodes/truncated": "truncated",
    "episodes/turns": "turns",
    "episodes/kept_after_kill": "kept_episodes",
    "episodes/replayed_after_kill": "replayed_episodes",
    "episodes/replay_refused": "replay_refused",
    "groups/count": "groups",
    "groups/without_spread": "groups_without_spread",
    "groups/solved": "groups_solved",
    "groups/unsolved": "groups_unsolved",
    "groups/refilled": "refilled_groups",
    "groups/dropped": "dropped_groups",
    "groups/kept_after_kill": "kept_groups",
    "tokens/sampled": "sampled_tokens",
    "tokens/per_second": "tokens_per_s",
    "tokens/forced_share": "forced_share",
    "tokens/prompt": "prompt_tokens",
    "tokens/reusable": "reusable_tokens",
    "tokens/cache_hit_rate": "cache_hit_rate",
    "tokens/trained": "trained_tokens",
    "tokens/padded": "padded_tokens",
    "tokens/original": "original_tokens",
    "tokens/replaced": "replaced_tokens",
    "tokens/replacing": "replacing_tokens",
    "gap/mean": "logprob_gap_mean",
    "gap/max": "logprob_gap",
    "gap/kl": "logprob_kl",
    "policy/learning_rate": "learning_rate",
    "policy/skipped_optimizer_steps": "skipped_optimizer_steps",
    "policy/loss_scale": "loss_scale",
    "age/mean": "age",
    "age/max": "age_max",
    "time/rollout": "rollout_seconds",
    "time/generate": "generate_seconds",
    "time/environment": "env_seconds",
    "time/train": "train_seconds",
    "time/sync": "sync_seconds",
    "time/held": "held_seconds",
}
"""Name -> field of `StepMetrics`, a number. A field that is None in a step has no figure in this step."""
STEP_GROUPS = {
    "policy/": "losses",
    "episodes/ended/": "stop_reasons",
    "episodes/fault/": "failures",
    "episodes/branches/": "branches",
    "episodes/metrics/": "episode_metrics",
    "time/wait/": "waits",
    "idle/": "idle",
}
"""Begin of names -> field of `StepMetrics`, a mapping. Each of its keys is the rest of a name."""
CRITIC_LOSSES = {
    "critic/loss": "value_loss",
    "critic/grad_norm": "value_grad_norm",
    "critic/value": "value",
    "critic/return": "return",
    "critic/explained_variance": "explained_variance",
}
"""Name -> key of `StepMetrics.losses` that is of PPO's critic, not of the policy."""
ENVIRONMENT_FIGURES = {
    "reward": "reward",
    "success": "success",
    "groups": "groups",
    "groups_without_spread": "groups_without_spread",
    "episodes": "episodes",
    "failed": "failed",
    "replaced": "replaced",
    "turns": "turns",
    "tokens": "sampled_tokens",
}
"""End of the names env/ENVIRONMENT/... -> field of `EnvironmentFigures`, of each environment of a mixture."""
WITHOUT_NAME = {
    "step": "it is the x axis",
    "weight_version": "it is a text",
    "ranks": "it is the same in all steps",
    "skipped": "it is a text",
    "not_finite": "trackers get the figures that it names as NaN",
    "ages": "it is a distribution",
    "version_spans": "it is a distribution",
}
"""Field of `StepMetrics` -> the reason why trackers do not get it."""
EVALUATION_FIGURES = {
    "evaluation/reward": "reward",
    "evaluation/success": "success",
    "evaluation/episodes": "episodes",
    "evaluation/failed": "failed",
    "evaluation/seconds": "seconds",
    "evaluation/push_delay": "push_delay",
}
"""Name -> key of a line of evaluations.jsonl."""
EVALUATION_GROUPS = {"evaluation/metrics/": "episode_metrics"}
"""Begin of names -> key of a line of evaluations.jsonl, a mapping. Each of its keys is the rest of a name."""
_NAMES_OF_CRITIC = {key: name for name, key in CRITIC_LOSSES.items()}
EVALUATED_ENVIRONMENT_FIGURES = {"reward": "reward", "success": "success", "episodes": "episodes", "failed": "failed"}
"""End of the names evaluation/env/ENVIRONMENT/... -> key of an environment in a line of evaluations.jsonl."""
_COMPARABLE = ("/reward", "/success")


def figures_of_step(metrics: StepMetrics) -> dict[str, float]:
    """Return name -> figure of a step. NaN stays."""
    figures = _numbers({name: getattr(metrics, field) for name, field in STEP_FIGURES.items()})
    for prefix, field in STEP_GROUPS.items():
        figures |= _numbers({name_in_group(prefix, key): value for key, value in getattr(metrics, field).items()})
    for name, of_environment in metrics.environments.items():
        values = {end: getattr(of_environment, field) for end, field in ENVIRONMENT_FIGURES.items()}
        figures |= _numbers({f"env/{name}/{end}": value for end, value in values.items()})
    return figures


def name_in_group(prefix: str, key: str) -> str:
    """Return the name of a key of the mapping whose names begin with `prefix`."""
    return _NAMES_OF_CRITIC.get(key, f"{prefix}{key}") if prefix == "policy/" else f"{prefix}{key}"


def figures_of_evaluation(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> figure of a line of evaluations.jsonl.

    An incomplete evaluation has neither reward nor success, because those of other weights cannot be compared with it.
    """
    figures = _numbers({name: evaluation.get(key) for name, key in EVALUATION_FIGURES.items()})
    for prefix, group in EVALUATION_GROUPS.items():
        figures |= _numbers({f"{prefix}{key}": value for key, value in evaluation.get(group, {}).items()})
    for name, values in evaluation.get("environments", {}).items():
        own = {end: values.get(key) for end, key in EVALUATED_ENVIRONMENT_FIGURES.items()}
        figures |= _numbers({f"evaluation/env/{name}/{end}": value for end, value in own.items()})
    if evaluation.get("incomplete") is not None:
        return {name: figure for name, figure in figures.items() if not name.endswith(_COMPARABLE)}
    return figures


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
