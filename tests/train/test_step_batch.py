"""The samples of a step are divided over the ranks, and sent to them."""

from __future__ import annotations

from tests.train.conftest import make_report, make_trajectory
from verl_server.train.batches import Sample
from verl_server.train.step_batch import StepBatch, divide, encode_share


def test_the_samples_are_divided_by_tokens() -> None:
    samples = [Sample(make_trajectory(0, 1.0, length, seed=length), 1.0) for length in (1, 9, 4, 17, 2, 6, 30)]
    assert divide(samples, 1) == [samples]
    shares = divide(samples, 2)
    assert sorted(s.trajectory.task.seed for share in shares for s in share) == [1, 2, 4, 6, 9, 17, 30]
    tokens = [sum(len(s.trajectory.tokens) for s in share) for share in shares]
    assert abs(tokens[0] - tokens[1]) <= 4
    assert [samples.index(s) for s in shares[0]] == sorted(samples.index(s) for s in shares[0])
    assert [len(share) for share in divide(samples[:2], 3)] == [1, 1, 0]


def test_a_rank_gets_its_samples() -> None:
    samples = [Sample(make_trajectory(0, 1.0, 3, seed=seed), 0.5 * seed, sampled_step=seed) for seed in (1, 2)]
    report = make_report([sample.trajectory for sample in samples], 2)
    batch = StepBatch.decode(encode_share(report, samples))
    assert batch.samples == samples and batch.report == report and batch.groups == []
