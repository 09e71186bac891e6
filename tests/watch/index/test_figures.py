"""The figures of a step are those of its line in metrics.jsonl."""

from __future__ import annotations

import random
from pathlib import Path

from tests.watch.index.runs import FIRST, episode, follow, writer
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory
from verl_server.train.metrics import StepMetrics, describe_rollout
from verl_server.train.rollout_report import merge_reports, report_rollout
from verl_server.watch.index.run_index import RunIndex


def played(draw: random.Random, step: int, rank: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return (trajectories, those that others replaced) of a rank: plain episodes, agents' branches, failures."""
    kept, replaced = [], []
    for group in range(3 * rank, 3 * rank + 3):
        for member in range(4):
            attempt = 0
            while draw.random() < 0.2:
                lost = episode(group, member, None, length=draw.randrange(4), attempt=attempt)
                lost.fault = Fault.INFRASTRUCTURE
                replaced.append(lost)
                attempt += 1
            branches = draw.choice((0, 0, 1, 3))
            reward = draw.choice((None, 0.0, 0.25, 1.0))
            for branch in range(max(1, branches)):
                t = episode(group, member, reward, length=draw.choice((0, 2, 30)), attempt=attempt, branch=branch)
                t.session = f"{step}-{group}-{member}" if branches else ""
                if reward is not None and draw.random() < 0.2:
                    t.stop_reason, t.error = StopReason.MAX_TOKENS, "the agent met its limit"
                kept.append(t)
            for t in kept[-branches:] if branches else ():  # the branches of an episode have one end
                t.stop_reason, t.error, t.reward = kept[-1].stop_reason, kept[-1].error, kept[-1].reward
    return kept, replaced


def metrics_of(ranks: list[tuple[list[Trajectory], list[Trajectory]]], step: int) -> StepMetrics:
    reports = [
        report_rollout(kept, 0, 1.0, step=step, rank=rank, env_url="e", server_url="s", replaced=replaced)
        for rank, (kept, replaced) in enumerate(ranks)
    ]
    return describe_rollout(merge_reports(reports), step=step, version=f"{step}@{FIRST}", ranks=2, gap=None)


def test_steps_are_as_in_metrics(tmp_path: Path) -> None:
    draw, wanted = random.Random(3), []
    files = [writer(tmp_path, rank=rank) for rank in range(2)]
    for step in range(12):
        ranks = [played(draw, step, rank) for rank in range(2)]
        wanted.append(metrics_of(ranks, step))
        for file, (kept, replaced) in zip(files, ranks, strict=True):
            file.record_trajectories(step, [*kept, *replaced])
    for file in files:
        file.close()
    index = follow(RunIndex(tmp_path))
    try:
        for row, metrics in zip(index.steps(), wanted, strict=True):
            assert metrics.reward is not None and row.mean_reward is not None
            assert abs(row.mean_reward - metrics.reward) < 1e-9
            assert (row.episodes, row.failed, row.unsampled) == (
                metrics.trajectories,
                metrics.failed,
                metrics.unsampled,
            )
            assert (row.replaced, row.sampled) == (metrics.replaced, metrics.sampled_tokens)
            assert abs(row.mean_turns - metrics.turns) < 1e-9
            groups = index.groups(row.name)
            ends: dict[str, int] = {}
            for group in groups:
                for name, count in group.ends.items():
                    ends[name] = ends.get(name, 0) + count
            assert ends == metrics.stop_reasons
            assert sum(group.failed for group in groups) == metrics.failed
            assert sum(group.spread == 0 and group.scored > 1 for group in groups) == row.without_spread
    finally:
        index.close()
