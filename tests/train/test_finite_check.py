"""A value that is not finite ends the run with its place, on all ranks, before it reaches the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.train.conftest import make_trajectory
from tests.train.test_run_end import log_of, next_step, play, weights
from verl_server.train import grpo
from verl_server.train.batches import MicroBatch, Sample
from verl_server.train.finite_check import NonFiniteError
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy

CPU = torch.device("cpu")
# One trajectory a micro-batch, the longer one first.
CONFIG = GRPOConfig(epochs=1, minibatches=1, warmup_steps=1, micro_batch_tokens=1)
SAMPLES = [Sample(make_trajectory(0, 1.0, 5, seed=0), 0.5), Sample(make_trajectory(0, 1.0, 3, seed=27), -0.5)]


def make_trainer(policy_folder: Path, dtype: torch.dtype) -> PolicyTrainer:
    return PolicyTrainer(load_policy(str(policy_folder), CPU, compute_dtype=dtype), CONFIG, 10, CPU)


def scale(parameter: Any, factor: float) -> None:
    with torch.no_grad():
        parameter.mul_(factor)


def large_products(model: Any) -> None:
    """Make the products of one layer exceed float16, from activations that do not."""
    scale(model.model.layers[1].mlp.up_proj.weight, 1e3)
    scale(model.model.layers[1].mlp.down_proj.weight, 1e5)


def large_weight(model: Any) -> None:
    scale(model.model.layers[0].self_attn.o_proj.weight, 1e6)


def large_head(model: Any) -> None:
    scale(model.lm_head.weight, 5e4)


def steep_gate(model: Any) -> None:
    """Neither gate nor up overflow, but their product does, which no module computes."""
    scale(model.model.layers[0].mlp.up_proj.weight, 2e3)
    scale(model.model.layers[0].mlp.gate_proj.weight, 2e3)


PLACES: list[tuple[Callable[[Any], None], str]] = [
    (large_products, "not finite is model.layers.1.mlp.down_proj. The largest"),
    (steep_gate, "model.layers.0.mlp.down_proj (its input is not finite either"),
    (large_head, "but the logits (lm_head) are not"),
    (large_weight, "The weight model.layers.0.self_attn.o_proj.weight is not finite in that dtype"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "place"), PLACES)
def test_activations_that_overflow_are_named(policy_folder: Path, change: Callable[[Any], None], place: str) -> None:
    trainer = make_trainer(policy_folder, torch.float16)
    change(trainer.policy.language_model)
    before = [p.full_tensor().detach().clone() for _, p in trainer.policy.named_weights()]  # type: ignore[attr-defined]
    calls: list[Callable[[], Any]] = [
        lambda: trainer.update(SAMPLES, 0),
        lambda: trainer.compare_logprobs([sample.trajectory for sample in SAMPLES], "0"),
    ]
    for call in calls:
        with pytest.raises(NonFiniteError) as caught:
            call()
        assert place in str(caught.value)
        assert "Train with --compute-dtype bfloat16" in str(caught.value)
    after = [p.full_tensor() for _, p in trainer.policy.named_weights()]  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert trainer.steps.applied == 0
    hooks = [module._forward_hooks for module in trainer.policy.language_model.model.layers[1].mlp.modules()]
    assert not any(hooks)  # a pass after the diagnosis costs nothing more


@pytest.mark.usefixtures("one_rank")
def test_the_pass_that_overflows_is_the_one_that_runs_again(policy_folder: Path) -> None:
    """Only the second of two micro-batches, with five tokens, overflows."""
    trainer = make_trainer(policy_folder, torch.float32)
    layer = trainer.policy.language_model.model.layers[0]

    def breaks(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("inf") if output.shape[1] == 5 else output

    layer.mlp.act_fn.register_forward_hook(breaks)
    with pytest.raises(NonFiniteError, match=r"is model\.layers\.0\.mlp\.act_fn\. If the weights have diverged"):
        trainer.update(SAMPLES, 0)


@pytest.mark.usefixtures("one_rank")
def test_a_loss_that_is_not_finite_ends_the_run(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(policy_folder, torch.float32)
    before = [weight.detach().clone() for weight in trainer.policy.parameters()]
    of = MicroBatch.of

    def recorded(value: float) -> Callable[..., MicroBatch]:
        def make(*arguments: Any) -> MicroBatch:
            batch = of(*arguments)
            return replace(batch, behaviour_logprobs=torch.full_like(batch.behaviour_logprobs, value))

        return make

    for value, reason in (
        (-torch.inf, "The trajectories have behaviour_logprobs that are not finite"),
        (-1e3, "grew by more than float32 can express since it was sampled"),
    ):
        monkeypatch.setattr(grpo.MicroBatch, "of", recorded(value))
        with pytest.raises(NonFiniteError, match=reason):
            trainer.update(SAMPLES, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


@pytest.mark.usefixtures("one_rank")
def test_gradients_that_are_not_finite_end_an_fp32_run(policy_folder: Path) -> None:
    trainer = make_trainer(policy_folder, torch.float32)
    before = [weight.detach().clone() for weight in trainer.policy.parameters()]
    weight = trainer.policy.language_model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(
        NonFiniteError, match=r"gradient of model\.layers\.1\.mlp\.up_proj\.weight is not finite, altho"
    ):
        trainer.update(SAMPLES, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


@pytest.mark.parametrize("ranks", at_depth([2, 1]))
def test_all_ranks_end_if_the_activations_of_one_overflow(policy_folder: Path, tmp_path: Path, ranks: int) -> None:
    """The error is raised in the first optimizer step of a training step, so the step is not trained."""
    out = tmp_path / "run"
    codes = play("activations", ranks - 1, ranks, policy_folder, out, "--compute-dtype", "float16")
    log = log_of(out).read_text()
    assert codes == [1] * ranks, log[-6000:]
    assert "The first module whose output is not finite is model.layers.1.mlp.down_proj" in log
    assert ("(on rank 1 of 2)" in log) == (ranks == 2)
    assert "--resume continues the run" in log and "Traceback" not in log
    assert next_step(out) == 2
    assert all(weight.isfinite().all() for weight in weights(out).values())
