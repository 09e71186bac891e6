"""Reports of several ranks are merged, failures name who failed, and a step with nothing to train on is explained."""

from __future__ import annotations

import pytest

from tests.rollout.test_token_counts import conversation, exported
from tests.train.conftest import make_report, make_trajectory
from verl_server.rollout.trajectory import StopReason
from verl_server.train.metrics import describe_rollout
from verl_server.train.rollout_report import merge_reports, report_rollout


@pytest.mark.parametrize("reason", [StopReason.SESSION_LOST, StopReason.ABORTED, StopReason.GENERATION_TIMEOUT])
def test_a_failure_of_the_server_names_its_url(reason: StopReason) -> None:
    lost = make_trajectory(0, None)
    lost.stop_reason, lost.error = reason, "gone"
    report = report_rollout([lost], 0, 1.0, step=0, rank=0, env_url="env", server_url="server", replaced=[lost])
    assert [failure.url for failure in report.failures + report.replaced] == ["server"] * 2


def test_failures_name_the_url_of_whoever_failed() -> None:
    generation = make_trajectory(2, 1.0)
    generation.stop_reason, generation.reward, generation.error = StopReason.GENERATION_ERROR, None, "503"
    merged = merge_reports([make_report([make_trajectory(0, None, seed=9)], 0, 0), make_report([generation], 0, 1)])
    assert [(f.rank, f.url, f.stop_reason, f.seed, f.group, f.turns) for f in merged.failures] == [
        (0, "http://env:1", "env_error", 9, 0, 1),
        (1, "http://server:2", "generation_error", 0, 2, 1),
    ]
    assert merged.failures[0].error == "ws://env:1/ws did not answer `step`"
    metrics = describe_rollout(merged, step=4, version="3", ranks=2, gap=None)
    assert metrics.failed == 2 and metrics.reward is None


def test_branches_of_agents_are_counted_by_kind_over_all_ranks() -> None:
    tree = conversation()
    tree.add(0, began="edited")
    reports = [make_report(exported(tree), 0), make_report(exported(conversation()), 0, 1)]
    assert merge_reports(reports).branches == {"root": 2, "edited": 1}
    assert make_report([make_trajectory(0, 1.0)], 0).branches == {}


def test_metrics_of_episodes_are_means_over_those_that_have_them_on_all_ranks() -> None:
    """Each episode counts once, whatever its branches, and an unsampled one not at all."""
    tree = conversation()
    tree.add(0, began="edited")
    branches = exported(tree)
    for branch in branches:
        branch.metrics = {"steps": 3.0, "near": 0.5}
    other, plain, unsampled = (make_trajectory(group, 1.0) for group in range(1, 4))
    other.metrics, unsampled.metrics = {"near": 1.0}, {"near": 90.0}
    unsampled.loss_mask = [0] * len(unsampled.tokens)
    reports = [make_report(branches, 0), make_report([other, plain, unsampled], 0, 1)]
    merged = merge_reports(reports)
    metrics = describe_rollout(merged, step=0, version="1", ranks=2, gap=None)
    assert len(branches) == 2 and metrics.episode_metrics == {"near": 0.75, "steps": 3.0}
    assert describe_rollout(make_report([plain], 0), step=0, version="1", ranks=1, gap=None).episode_metrics == {}


def test_nothing_to_train_on_is_explained() -> None:
    failed = [make_trajectory(0, None) for _ in range(3)]
    assert make_report(failed, 0).obstacle() == "3 of 3 episodes failed: 3 x ws://env:1/ws did not answer `step`"
    failed[0].error = "refused"
    equal = [make_trajectory(0, 1.0), make_trajectory(0, 1.0)]
    assert make_report(equal, 0).obstacle() == (
        "in no group did the rewards differ (2 episodes have a reward, 1 on average)"
    )
    assert make_report([*equal, failed[0]], 0).obstacle() == (
        "in no group did the rewards differ (2 episodes have a reward, 1 on average); "
        "1 of 3 episodes failed: 1 x http://env:1: refused"
    )
    unjudged = make_trajectory(0, 1.0)
    unjudged.reward = None
    reason = make_report([unjudged], 0).obstacle()
    assert reason == "no episode has both a reward and a token to train on (ends: {'done': 1})"
    assert make_report(equal, 2).obstacle() is None


def test_many_errors_are_counted_and_the_most_frequent_are_shown() -> None:
    failed = [make_trajectory(0, None) for _ in range(8)]
    for trajectory, error in zip(failed, "aaabbcde", strict=True):
        trajectory.error = error
    assert str(make_report(failed, 0).obstacle()).endswith(
        "3 x http://env:1: a; 2 x http://env:1: b; 1 x http://env:1: c; and 2 other error(s)"
    )
