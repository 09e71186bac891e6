"""The learning rate of each step equals tables worked out by hand, and a trainer trains with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.train.batches import Sample
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.schedules import Schedule, learning_rate

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "final", "warmup_steps", "rates"),
    [
        ("linear", 0.0, 0, [8.0, 6.0, 4.0, 2.0]),
        ("linear", 0.5, 0, [8.0, 6.0, 4.0, 4.0]),
        ("linear", 0.0, 2, [4.0, 6.0, 4.0, 2.0]),
        ("linear", 1.0, 4, [2.0, 4.0, 6.0, 8.0]),
        ("cosine", 0.0, 0, [8.0, 4 + 8**0.5, 4.0, 4 - 8**0.5]),  # 4 + 4 cos(45 degrees) = 4 + sqrt(8)
        ("cosine", 0.5, 0, [8.0, 6 + 2**0.5, 6.0, 6 - 2**0.5]),
        ("cosine", 0.0, 4, [2.0, (4 + 8**0.5) / 2, 3.0, 4 - 8**0.5]),
        ("constant", 0.15, 0, [8.0, 8.0, 8.0, 8.0]),
        ("constant", 0.0, 3, [8 / 3, 16 / 3, 8.0, 8.0]),
    ],
)
def test_rates_of_a_run_of_four_steps(schedule: Schedule, final: float, warmup_steps: int, rates: list[float]) -> None:
    found = [
        learning_rate(step, 4, peak=8.0, schedule=schedule, final=final, warmup_steps=warmup_steps) for step in range(4)
    ]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_step_behind_the_last_one_has_the_final_rate(schedule: Schedule) -> None:
    """A run that is resumed with fewer steps may have passed its end."""
    for step in (4, 5, 100):
        assert learning_rate(step, 4, peak=8.0, schedule=schedule, final=0.25) == pytest.approx(2.0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_a_resumed_run_has_the_rates_of_the_whole_run(policy_folder: Path, schedule: Schedule) -> None:
    """The rate is set for each optimizer step and reported. A trainer that begins at a later step has the same one."""
    config = GRPOConfig(
        learning_rate=1e-3, warmup_steps=2, epochs=1, minibatches=1, schedule=schedule, final_learning_rate=0.15
    )
    samples = [Sample(make_trajectory(0, 1.0, 2, seed=n), 1.0) for n in range(2)]

    def rates(steps: range) -> list[float | None]:
        trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), config, 6, CPU)
        found = []
        for step in steps:
            found.append(trainer.update(samples, step).learning_rate)
            assert [group["lr"] for group in trainer.optimizer.param_groups] == [found[-1]]
        return found

    whole = rates(range(6))
    assert whole == [
        learning_rate(step, 6, peak=1e-3, schedule=schedule, final=0.15, warmup_steps=2) for step in range(6)
    ]
    assert rates(range(4, 6)) == whole[4:]


def test_a_share_that_no_step_would_have_is_refused() -> None:
    with pytest.raises(BadRequestError, match=r"--grpo\.final-learning-rate has no effect on --grpo\.schedule consta"):
        GRPOConfig(schedule="constant", final_learning_rate=0.5)
    with pytest.raises(BadRequestError, match=r"--grpo\.final-learning-rate must be from 0 to 1, not 1\.5"):
        GRPOConfig(final_learning_rate=1.5)
    assert dataclasses.replace(GRPOConfig(), schedule="constant").schedule == "constant"
