"""The figures of each environment of a mixture are those of its own episodes, whatever ranks played them."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from tests.train.conftest import make_trajectory
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.environment_figures import EnvironmentFigures, EnvironmentSums, mean_over_mixture
from verl_server.train.metrics import describe_rollout, describe_step
from verl_server.train.mixture import MixedEnvironment, Mixture
from verl_server.train.rollout_report import RolloutReport, count_errors, merge_reports, report_rollout

MIXTURE = Mixture((MixedEnvironment("code", "http://a:1", 2, success=0.5), MixedEnvironment("math", "http://b:2")))


def played(environment: str, group: int, *rewards: float | None) -> list[Trajectory]:
    found = [make_trajectory(group, reward, length=2, seed=seed) for seed, reward in enumerate(rewards)]
    for trajectory in found:
        trajectory.task = msgspec.structs.replace(trajectory.task, environment=environment)
    return found


def report(trajectories: list[Trajectory], replaced: list[Trajectory], rank: int) -> RolloutReport:
    return report_rollout(
        trajectories, 2, 1.0, step=4, rank=rank, env_url="", server_url="s", replaced=replaced,
        mixture=MIXTURE.judged(1.0),
    )  # fmt: skip


def test_sums_of_two_ranks() -> None:
    first = report(played("code", 0, 0.5, 0.0, None) + played("math", 1, 0.75, 0.75), played("code", 0, None), 0)
    second = report(played("code", 2, 1.0, 1.0), [], 1)
    merged = merge_reports([first, second])
    metrics = describe_rollout(merged, step=4, version="4@a", ranks=2, gap=None)
    assert metrics.environments == {
        "code": EnvironmentFigures(
            groups=2, groups_without_spread=1, episodes=5, failed=1, replaced=1, reward=2.5 / 4, success=0.75,
            turns=1.0, sampled_tokens=10,
        ),
        "math": EnvironmentFigures(
            groups=1, groups_without_spread=1, episodes=2, failed=0, replaced=0, reward=0.75, success=0.0,
            turns=1.0, sampled_tokens=4,
        ),
    }  # fmt: skip
    assert describe_step(metrics).endswith("  code 0.625, math 0.750")
    assert {(f.environment, f.url) for f in merged.failures + merged.replaced} == {("code", "http://a:1")}
    assert count_errors(merged.failures) == "1 x code: http://a:1: ws://env:1/ws did not answer `step`"


def test_an_environment_without_a_group_has_no_mean() -> None:
    metrics = describe_rollout(report(played("code", 0, 0.5), [], 0), step=4, version="4@a", ranks=1, gap=None)
    absent = dataclasses.asdict(metrics.environments["math"])
    assert {name for name, figure in absent.items() if figure is None} == {"reward", "success", "turns"}
    assert not any(absent[name] for name in ("groups", "episodes", "failed", "sampled_tokens"))
    without = report_rollout(played("code", 0, 0.5), 1, 1.0, step=4, rank=0, env_url="", server_url="s")
    assert without.environments == {}


def test_a_mean_over_the_mixture_needs_each_environment() -> None:
    assert mean_over_mixture(MIXTURE, {"code": 0.3, "math": 0.9}) == pytest.approx((2 * 0.3 + 0.9) / 3)
    assert mean_over_mixture(MIXTURE, {"code": 0.3, "math": None}) is None
    assert EnvironmentSums(turns=3) + EnvironmentSums(turns=4, failed=1) == EnvironmentSums(turns=7, failed=1)
