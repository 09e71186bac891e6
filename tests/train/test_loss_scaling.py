"""float16 passes train like others, and an optimizer step whose gradients overflow changes nothing but the scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.train.conftest import make_trajectory
from tests.train.faulty_run import STEP, Player, Servers
from tests.train.test_run_end import log_of, play
from verl_server.train import grpo
from verl_server.train.batches import Sample
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.loss_scaling import LossScaleError, LossScaling
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks

CPU = torch.device("cpu")
CONFIG = GRPOConfig(
    groups=2, group_size=4, epochs=1, minibatches=1, warmup_steps=1, learning_rate=1.0, max_grad_norm=0.05
)
SAMPLES = [Sample(make_trajectory(0, 1.0, 2 + i % 4, seed=i), 0.5 if i % 2 else -0.5) for i in range(8)]


@pytest.fixture
def trainer(policy_folder: Path, one_rank: None) -> PolicyTrainer:
    return make_trainer(policy_folder, torch.float16)


def make_trainer(policy_folder: Path, dtype: torch.dtype) -> PolicyTrainer:
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU, compute_dtype=dtype), CONFIG, 10, CPU)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
    return trainer


def weights(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([weight.full_tensor().detach().flatten().clone() for weight in parameters(trainer)])


def parameters(trainer: PolicyTrainer) -> list[Any]:
    return list(trainer.policy.parameters())


def multiply_loss(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply the gradients by `factor`. The reported loss stays."""
    policy_loss = grpo.policy_loss

    def multiplied(*arguments: Any, **settings: Any) -> Any:
        loss, sums = policy_loss(*arguments, **settings)
        return loss * factor, sums

    monkeypatch.setattr(grpo, "policy_loss", multiplied)


def test_gradients_are_unscaled_before_they_are_clipped(policy_folder: Path, trainer: PolicyTrainer) -> None:
    plain = make_trainer(policy_folder, torch.bfloat16)
    expected = plain.update(SAMPLES, 0).losses["grad_norm"]
    before = weights(trainer)
    learned = trainer.update(SAMPLES, 0)
    assert learned.losses["grad_norm"] == pytest.approx(expected, rel=0.05)
    assert learned.losses["grad_norm"] > CONFIG.max_grad_norm
    assert (weights(trainer) - before).norm().item() == pytest.approx(CONFIG.max_grad_norm, rel=1e-3)


def test_small_gradients_do_not_round_to_zero(
    policy_folder: Path, trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_loss(monkeypatch, 1e-7)
    expected = make_trainer(policy_folder, torch.bfloat16).update(SAMPLES, 0).losses["grad_norm"]
    learned = trainer.update(SAMPLES, 0)
    assert learned.losses["grad_norm"] == pytest.approx(expected, rel=0.05)


def test_a_step_that_overflows_is_skipped_and_not_counted(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(trainer)
    with monkeypatch.context() as patched:
        multiply_loss(patched, 1e30)
        learned = trainer.update(SAMPLES, 3)
    assert (learned.optimizer_steps, learned.skipped_optimizer_steps) == (0, 1)
    assert torch.equal(weights(trainer), before)
    assert (trainer.steps.applied, trainer.steps.last_step, trainer.scaling.scale) == (0, None, 2.0**15)
    assert "loss" in learned.losses and "grad_norm" not in learned.losses  # it would be no number in metrics.jsonl
    learned = trainer.update(SAMPLES, 4)
    assert (learned.optimizer_steps, learned.skipped_optimizer_steps) == (1, 0)
    assert (trainer.steps.applied, trainer.steps.last_step) == (1, 4)
    assert not torch.equal(weights(trainer), before)


def test_a_version_is_pushed_only_if_a_step_changed_the_weights(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers()
    run = GRPO(trainer, servers, Player(servers), all_ranks(), incarnation="5f2c9a1e")  # type: ignore[arg-type]
    run.push()
    run.step()
    with monkeypatch.context() as patched:
        multiply_loss(patched, 1e30)
        metrics = run.step().metrics
    assert (metrics.skipped, metrics.skipped_optimizer_steps, metrics.loss_scale) == (None, 1, 2.0**15)
    assert (run.version, run.next_step, run.progress().version, run.progress().next_step) == (1, 2, 1, 2)
    run.step()
    assert servers.pushed == ["0@5f2c9a1e", "1@5f2c9a1e", "3@5f2c9a1e"]


def test_overflows_at_every_scale_end_the_run(trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_loss(monkeypatch, 1e30)
    trainer.update(SAMPLES, 0)
    trainer.scaling.load_state_dict({**(trainer.scaling.state_dict() or {}), "scale": 2.0})
    for step in range(1, 4):  # below 1 twice, but not often enough
        trainer.update(SAMPLES, step)
    with pytest.raises(LossScaleError, match=r"multiplied by 0\.25 only: 5 optimizer .*--compute-dtype bfloat16"):
        trainer.update(SAMPLES, 4)


def test_other_dtypes_have_no_scale() -> None:
    scaling = LossScaling(torch.bfloat16, CPU)
    assert scaling.scale is None and scaling.state_dict() is None and not scaling.lower()
    weight = torch.ones(1, requires_grad=True)
    scaling.backward(weight.sum())
    scaling.unscale(torch.optim.SGD([weight]))
    assert weight.grad is not None and weight.grad.item() == 1.0


@pytest.mark.parametrize("ranks", at_depth([2, 1]))
def test_all_ranks_skip_if_the_shard_of_one_overflows(policy_folder: Path, tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "run"
    codes = play("gradients", ranks - 1, ranks, policy_folder, out, "--compute-dtype", "float16")
    log = log_of(out).read_text()
    assert codes == [0] * ranks, log[-6000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["skipped_optimizer_steps"] for step in steps] == [1 if n == STEP else 0 for n in range(len(steps))]
    assert [step["loss_scale"] for step in steps] == [2.0**16] * STEP + [2.0**15] * (len(steps) - STEP)
    run = json.loads((out / f"checkpoint-{len(steps)}/run.json").read_text())
    assert run["loss_scaling"]["scale"] == 2.0**15
