"""The demo's evaluations on held-out seeds: how many games were won, and what `--logger` sends of it.

`demo` calls both functions: a game is won if its reward is above 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from verl_server.rollout.trajectory import Trajectory, is_unsampled


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of the episodes in which the policy found the number.

    Episodes without a reward or without a sampled token are left out.
    """
    rewards = _rewards(trajectories)
    return sum(reward > 0 for reward in rewards) / max(1, len(rewards))


def evaluation_figures(trajectories: Sequence[Trajectory], step: int) -> dict[str, Any]:
    """Return what trackers get of an evaluation of the weights after `step` steps: keys of evaluations.jsonl."""
    rewards = _rewards(trajectories)
    return {
        "step": step,
        "reward": statistics.mean(rewards) if rewards else None,
        "success": success_rate(trajectories),
        "episodes": len(rewards),
        "failed": len(trajectories) - len(rewards),
    }


def _rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    return [t.reward for t in trajectories if t.reward is not None and not is_unsampled([t])]
