"""The line of a step: means over the episodes of all ranks, and what the log prints of it."""

from __future__ import annotations

import pytest

from tests.train.conftest import make_report, make_trajectory
from verl_server.logprob_gap import LogprobGap
from verl_server.rollout.trajectory import Event, Fault, StopReason, Task, Trajectory
from verl_server.train.grpo import group_advantages
from verl_server.train.metrics import describe_rollout, describe_step
from verl_server.train.rollout_report import RolloutReport, merge_reports, report_rollout
from verl_server.train.skipped_steps import NothingToTrainError, SkippedSteps


def test_ranks_count_by_their_episodes() -> None:
    """One rank has three episodes and another has one. Means are taken over the four episodes, not over the ranks."""
    first = [make_trajectory(0, 1.0, 2), make_trajectory(0, 0.0, 4), make_trajectory(0, 0.5, 6)]
    second = [make_trajectory(1, 4.0, 8)]
    second[0].events = [Event("env", 0.0, 8.0), Event("generate", 0.0, 4.0)]
    merged = merge_reports([make_report(first, 3, 0, seconds=1.0), make_report(second, 0, 1, seconds=4.0)])
    metrics = describe_rollout(merged, step=4, version="3", ranks=2, gap=LogprobGap(3, 0.125, 0.25, 0.01))
    assert (metrics.ranks, metrics.trajectories, metrics.trainable, metrics.kept) == (2, 4, 4, 3)
    assert metrics.reward == pytest.approx(5.5 / 4)
    assert (metrics.logprob_gap, metrics.logprob_gap_mean, metrics.logprob_kl) == (0.25, 0.125, 0.01)
    assert metrics.sampled_tokens == 20
    assert (metrics.rollout_seconds, metrics.tokens_per_s) == (4.0, 5.0)
    assert (metrics.env_seconds, metrics.generate_seconds) == (2.0, 1.0)
    assert metrics.stop_reasons == {"done": 4}
    assert metrics.skipped is None


def test_episodes_without_a_sampled_token_are_counted_and_in_no_mean() -> None:
    """An empty one of an agent, and one whose first prompt did not fit. A branch with tokens makes an episode count."""
    bypassed = Trajectory(task=Task(seed=0), reward=3.0, stop_reason=StopReason.DONE)
    full = Trajectory(task=Task(seed=1))
    full.finish(StopReason.CONTEXT_FULL)
    assert full.reward == 0.0
    first, second = make_trajectory(1, 1.0), make_trajectory(1, 1.0)
    for number, branch in enumerate((first, second)):
        branch.session, branch.member, branch.branch = "s", 0, number
    first.loss_mask = [0] * len(first.loss_mask)
    played = [bypassed, full, first, second, make_trajectory(2, 0.5), make_trajectory(3, None)]
    merged = merge_reports([make_report(played[:2], 0), make_report(played[2:], 0, 1)])
    assert (merged.episodes, merged.scored, merged.unsampled, merged.too_long) == (5, 2, 2, 1)
    metrics = describe_rollout(merged, step=4, version="0", ranks=2, gap=None)
    assert (metrics.reward, metrics.unsampled, metrics.failed, metrics.trainable) == (0.75, 2, 1, 2)
    assert "unsampled 2 of 5" in describe_step(metrics)
    assert "in 2 of 5 episodes the policy sampled no token. The first prompt does not fit" in str(metrics.skipped)
    assert "The answers of the server are empty" in str(metrics.skipped)
    samples = group_advantages([*played, make_trajectory(1, 0.0)], False)
    assert not any(sample.trajectory in (bypassed, full) for sample in samples) and len(samples) == 2
    everything = merge_reports([make_report([full], 0)])
    assert str(everything.obstacle()).startswith("no episode has both a reward and a token to train on (ends: {'con")
    only = report_rollout([bypassed], 0, 1.0, step=0, rank=0, env_url="e", server_url="s", by_agent=True)
    assert "No request of the agent was answered in its session" in str(only.obstacle())


def test_steps_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    failed = describe_rollout(make_report([make_trajectory(0, None)], 0), step=4, version="0", ranks=1, gap=None)
    equal = describe_rollout(make_report([make_trajectory(0, 1.0)], 0), step=5, version="0", ranks=1, gap=None)
    trained = describe_rollout(make_report([make_trajectory(0, 1.0)], 1), step=5, version="0", ranks=1, gap=None)
    skipped = SkippedSteps(most=3, pause=2.0)
    for metrics in (failed, failed, trained, failed, equal):
        skipped.note(metrics)
    assert pauses == [2.0, 4.0, 2.0, 0.0]  # a failing environment gets time to recover; equal rewards need no pause
    with pytest.raises(NothingToTrainError, match=r"3 step\(s\) in a row had nothing to train on. Step 4: 1 of 1 epi"):
        skipped.note(failed)


def test_skipped_optimizer_steps_are_printed() -> None:
    metrics = describe_rollout(RolloutReport(), step=3, version="3", ranks=1, gap=None)
    metrics.loss_scale = 512.0
    assert "optimizer" not in describe_step(metrics)
    metrics.skipped_optimizer_steps = 2
    assert "2 optimizer step(s) skipped, loss scale 512" in describe_step(metrics)


def test_replaced_episodes_are_counted_beside_the_others() -> None:
    """Two lost episodes of 1 and 3 tokens; one of them has a replacement that is longer and better than the others."""
    lost = [make_trajectory(0, None, 1), make_trajectory(0, None, 3)]
    better = make_trajectory(0, 2.0, 8)
    better.attempt = 2
    blamed = make_trajectory(0, 0.0, 5)
    blamed.stop_reason, blamed.error, blamed.fault = StopReason.TIME_LIMIT, "too long", Fault.POLICY
    played = [better, make_trajectory(0, 1.0, 2), blamed]
    first = report_rollout(played, 3, 1.0, step=0, rank=0, env_url="e", server_url="s", replaced=lost)
    merged = merge_reports([first, make_report([make_trajectory(1, 1.0, 5)], 0, 1)])
    metrics = describe_rollout(merged, step=0, version="0", ranks=2, gap=None)
    assert (metrics.trajectories, metrics.failed, metrics.replaced) == (4, 1, 2)
    assert metrics.failures == {"policy": 1, "infrastructure": 2}
    assert (metrics.replaced_tokens, metrics.replacing_reward, metrics.replacing_tokens) == (2.0, 2.0, 8.0)
    assert (metrics.original_reward, metrics.original_tokens) == (pytest.approx(2 / 3), 4.0)
    assert [(f.fault, f.replaced, f.attempt) for f in merged.failures + merged.replaced] == [
        ("policy", False, 0),
        ("infrastructure", True, 0),
        ("infrastructure", True, 0),
    ]
    assert merged.obstacle() is None
    none = describe_rollout(make_report([make_trajectory(0, None)], 0), step=0, version="0", ranks=1, gap=None)
    assert (none.replaced_tokens, none.replacing_reward, none.original_reward) == (None, None, None)
