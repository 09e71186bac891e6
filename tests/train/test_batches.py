"""Packing puts every sample into one micro-batch within the token budget; the tensors mark the sampled tokens."""

from __future__ import annotations

import torch

from tests.train.conftest import make_trajectory
from verl_server.train.batches import MicroBatch, Sample, pack, sampled_positions

CPU = torch.device("cpu")


def test_micro_batches_stay_within_the_budget_and_waste_little() -> None:
    lengths = [3, 40, 5, 38, 4, 100, 39, 6]
    samples = [Sample(make_trajectory(0, 1.0, length), float(i)) for i, length in enumerate(lengths)]
    packed = pack(samples, 90)
    assert sorted(sample.advantage for rows in packed for sample in rows) == [float(i) for i in range(8)]
    sizes = [[len(sample.trajectory.tokens) for sample in rows] for rows in packed]
    # A sample above the budget is alone in its micro-batch. Rows are padded to the longest, which is the first.
    assert sizes == [[102], [42, 41], [40, 8], [7, 6, 5]]
    assert all(len(rows) * rows[0] <= 90 for rows in sizes[1:])
    assert pack([], 90) == []


def test_a_micro_batch_by_hand() -> None:
    short, long = make_trajectory(0, 1.0, 1), make_trajectory(0, 0.0, 3, seed=5)
    long.append_observation({}, [1])
    long.append_output([9], [-0.5], ["0"])
    batch = MicroBatch.of([Sample(long, -0.5), Sample(short, 0.5)], CPU)
    assert batch.tokens.tolist() == [[1, 2, 8, 9, 10, 1, 9], [1, 2, 3, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [2, 3, 4, 6, 7 + 2]
    assert batch.behaviour_logprobs.tolist() == [-1.0, -1.0, -1.0, -0.5, -1.0]
    assert batch.advantages.tolist() == [-0.5] * 4 + [0.5]


def test_no_samples_make_a_batch_of_nothing_to_learn() -> None:
    batch = MicroBatch.of([], CPU)
    assert batch.tokens.shape == (1, 2)
    assert len(batch.positions) == len(batch.behaviour_logprobs) == len(batch.advantages) == 0


def test_a_first_token_cannot_be_trained_on() -> None:
    trajectory = make_trajectory(0, 1.0)
    trajectory.loss_mask[0] = 1
    assert sampled_positions(trajectory).tolist() == [2, 3, 4]
