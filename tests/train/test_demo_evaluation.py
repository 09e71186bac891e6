"""The figures that the demo reports of its episodes on held-out seeds."""

from __future__ import annotations

import pytest

from tests.train.conftest import make_trajectory
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.demo_evaluation import evaluation_figures, success_rate


def unsampled() -> Trajectory:
    return Trajectory(task=Task(seed=0), reward=1.0, stop_reason=StopReason.DONE)


def test_the_success_rate_is_of_episodes_that_the_policy_played() -> None:
    assert success_rate([unsampled(), make_trajectory(0, 0.0), make_trajectory(0, None)]) == 0.0
    assert success_rate([make_trajectory(0, 1.0), make_trajectory(0, 0.0), unsampled()]) == 0.5


def test_an_evaluation_counts_episodes_without_a_score_as_failed() -> None:
    played = [make_trajectory(0, 0.5), make_trajectory(0, 0.0), make_trajectory(0, None), unsampled()]
    figures = evaluation_figures(played, step=3)
    assert figures == {"step": 3, "reward": pytest.approx(0.25), "success": 0.5, "episodes": 2, "failed": 2}
    assert evaluation_figures([make_trajectory(0, None)], step=0)["reward"] is None
