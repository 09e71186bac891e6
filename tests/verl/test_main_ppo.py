"""Three GRPO steps of `python -m verl.trainer.main_ppo` with our rollout, on the CPU, with nothing of verl replaced."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SERVER

from benchmarks.verl_run import Variant, VerlRun, Workload, work_folder

STEPS = 3
LOAD = Workload(prompts=4, samples=2, prompt_tokens=64, response_tokens=16, steps=STEPS, micro_batch=4)
_SECONDS = 900.0
pytestmark = pytest.mark.timeout(_SECONDS + 60)


@pytest.fixture
def work() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def train(tiny_model: Path, work: Path, variant: Variant, trainer_gpus: int = 1) -> list[dict[str, float]]:
    run = VerlRun(tiny_model, work, LOAD, variant=variant, trainer_gpus=trainer_gpus, server=SERVER)
    steps = run.steps(_SECONDS)
    wait_for_the_end_of(run)
    assert len(steps) == STEPS
    return steps


def wait_for_the_end_of(run: VerlRun) -> None:
    """Wait until no process of the run is left. Every one has the run's environment."""
    mark = run.environment()["VERL_FILE_LOGGER_PATH"].encode()
    deadline = time.monotonic() + 30
    while left := [process for process in Path("/proc").glob("[0-9]*") if mark in environment_of(process)]:
        assert time.monotonic() < deadline, [(path / "cmdline").read_bytes().replace(b"\0", b" ") for path in left]
        time.sleep(0.2)


def environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended
        return b""


def check_learning(steps: list[dict[str, float]]) -> None:
    for figures in steps:
        assert figures["critic/rewards/min"] < figures["critic/rewards/max"]
        assert math.isfinite(figures["actor/loss"])
        assert figures["actor/grad_norm"] > 0
    assert len({figures["critic/rewards/mean"] for figures in steps}) == STEPS


def test_two_ranks_train_two_replicas_on_their_gpus(tiny_model: Path, work: Path) -> None:
    steps = train(tiny_model, work, "shards", trainer_gpus=2)
    check_learning(steps)
    for figures in steps:
        # The server samples from the weights that the trainer has: its log-probabilities are the actor's, and every
        # token is of the newest version.
        assert figures["training/rollout_probs_diff_max"] < 1e-4
        assert figures["training/off_policy/trajectory_staleness/max"] == 0


def test_a_replica_on_gpus_of_its_own_gets_every_version(tiny_model: Path, work: Path) -> None:
    steps = train(tiny_model, work, "separate")
    check_learning(steps)
    staleness = [figures["training/off_policy/trajectory_staleness/max"] for figures in steps]
    assert all(0 <= versions <= 2 for versions in staleness), staleness
    assert all(figures["timing_s/update_weights"] > 0 for figures in steps)
