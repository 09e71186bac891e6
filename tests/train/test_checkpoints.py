"""A resumed run ends with exactly the weights of a run that was not interrupted, and no run is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.train.batches import Sample
from verl_server.train.checkpoints import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.metrics import RolloutReport, describe_rollout
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.run_folder import RunFolder

CPU = torch.device("cpu")
CONFIG = GRPOConfig(epochs=2, minibatches=3, learning_rate=1e-2, warmup_steps=3, seed=7)

pytestmark = pytest.mark.usefixtures("one_rank")


def make_trainer(policy_folder: Path, dtype: torch.dtype = torch.float32) -> PolicyTrainer:
    return PolicyTrainer(load_policy(str(policy_folder), CPU, compute_dtype=dtype), CONFIG, 4, CPU)


def train(trainer: PolicyTrainer, first: int, last: int) -> None:
    for step in range(first, last):
        samples = [
            Sample(make_trajectory(0, 1.0, 2 + i % 4, seed=10 * step + i), 0.5 if i % 2 else -0.5) for i in range(8)
        ]
        trainer.update(samples, step)


def save(trainer: PolicyTrainer, out: Path, step: int) -> Path:
    scaling = trainer.scaling.state_dict()
    return save_checkpoint(out, trainer.policy, trainer.optimizer, next_step=step, version=step, loss_scaling=scaling)


def load(trainer: PolicyTrainer, folder: Path) -> Progress:
    progress = load_checkpoint(folder, trainer.policy, trainer.optimizer)
    trainer.scaling.load_state_dict(progress.loss_scaling)
    return progress


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_resumed_run_is_the_run(policy_folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    straight, interrupted, resumed = (make_trainer(policy_folder, dtype) for _ in range(3))
    for trainer in (straight, interrupted):
        if dtype == torch.float16:  # the scale is another one than that of a new run, and it grows in step 1
            state = trainer.scaling.state_dict() or {}
            trainer.scaling.load_state_dict(state | {"scale": 64.0, "growth_interval": 9})
    train(straight, 0, 2)
    train(interrupted, 0, 1)
    save(interrupted, tmp_path, 1)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    progress = load(resumed, folder)
    assert (progress.next_step, progress.version) == (1, 1)
    assert resumed.scaling.scale == (64.0 if dtype == torch.float16 else None)
    train(resumed, 1, 2)
    assert resumed.scaling.scale == straight.scaling.scale == (128.0 if dtype == torch.float16 else None)
    for (name, ours), (_, theirs) in zip(resumed.policy.named_weights(), straight.policy.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_before_the_first_update(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    folder = save(trainer, tmp_path, 3)
    resumed = make_trainer(policy_folder)
    assert load_checkpoint(folder, resumed.policy, resumed.optimizer).next_step == 3
    train(trainer, 3, 4)
    train(resumed, 3, 4)
    pairs = zip(trainer.policy.parameters(), resumed.policy.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_checkpoint_without_a_loss_scale_starts_with_the_first_one(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    train(trainer, 0, 1)
    folder = save(trainer, tmp_path, 1)
    assert json.loads((folder / "run.json").read_text()).keys() == {"next_step", "version", "has_optimizer_state"}
    resumed = make_trainer(policy_folder, torch.float16)
    load(resumed, folder)
    train(resumed, 1, 2)
    assert (resumed.scaling.scale, resumed.steps.applied) == (2.0**16, 6)
    with_scale = save(resumed, tmp_path, 2)
    plain = make_trainer(policy_folder)
    load(plain, with_scale)
    train(plain, 2, 3)
    assert plain.scaling.scale is None and plain.steps.applied == 6


def test_only_a_finished_checkpoint_counts(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    first = save(trainer, tmp_path, 9)
    (tmp_path / "checkpoint-10").mkdir()  # as a save that was interrupted leaves it
    assert latest_checkpoint(tmp_path) == first
    second = save(trainer, tmp_path, 10)
    assert latest_checkpoint(tmp_path) == second
    assert list(tmp_path.glob("checkpoint-*")) == [second]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start()
    folder.start()  # accepted, because the folder is still empty
    folder.record(describe_rollout(RolloutReport(), step=0, version="0", ranks=1, gap=None))
    with pytest.raises(BadRequestError, match=r"run already holds a run \(metrics.jsonl.*\)\. Name another folder"):
        folder.start()
    with pytest.raises(BadRequestError, match=r"nothing to resume in .*run: it contains no finished checkpoint"):
        folder.resume()
    (tmp_path / "run/checkpoint-1").mkdir()
    (tmp_path / "run/checkpoint-1/run.json").write_text('{"next_step": 1}')
    with pytest.raises(BadRequestError, match="Continue it with --resume, or name another folder with --out"):
        folder.start()


def test_resuming_drops_the_steps_that_are_run_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(4):
        metrics = describe_rollout(RolloutReport(), step=step, version="0", ranks=1, gap=None)
        folder.record(metrics, [make_trajectory(0, 1.0)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "cut of')
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/run.json").write_text('{"next_step": 2}')
    assert folder.resume() == tmp_path / "checkpoint-2"
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [0, 1]
