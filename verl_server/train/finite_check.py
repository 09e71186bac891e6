"""Errors for log-probabilities, losses and gradients that are not finite. The error names where they come from.

`PolicyTrainer` looks for such values before each optimizer step, and the ranks agree on what was found. If there are
any, every rank calls a function of this module, and raises the error that the function returns. The text is the same
on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_server.errors import VerlServerError
from verl_server.train.batches import MicroBatch
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import Policy


class NonFiniteError(VerlServerError):
    """A pass computed infinity or NaN. No optimizer step was taken with it, so the weights are still finite."""


def logprobs_error(policy: Policy, batch: MicroBatch, config: GRPOConfig) -> NonFiniteError:
    """Return the error for log-probabilities that are not finite. It names the first module with such an output.

    All ranks call it, each with its micro-batch of that pass. The pass runs again, with a hook at each module.
    """
    dtype = str(policy.compute_dtype).removeprefix("torch.")
    place = _first_of_ranks(_broken_weight(policy) or _broken_module(policy, batch, config.temperature))
    text = f"Log-probabilities that the trainer computes in {dtype} are not finite."
    text += f" {place or 'A second pass did not show where'}."
    if policy.compute_dtype == torch.float16:
        text += f" The largest float16 is {torch.finfo(torch.float16).max:g}."
        return NonFiniteError(f"{text} Train with --compute-dtype bfloat16, which has the range of float32.")
    return NonFiniteError(f"{text} {_diverged(config)}")


def loss_error(batches: Sequence[MicroBatch], config: GRPOConfig) -> NonFiniteError:
    """Return the error for a loss that is not finite although the log-probabilities are. All ranks call it."""
    fields = ("behaviour_logprobs", "advantages")
    broken = [name for name in fields if not all(_is_finite(getattr(batch, name)) for batch in batches)]
    place = _first_of_ranks(f"The trajectories have {' and '.join(broken)} that are not finite" if broken else None)
    if place is None:
        place = "The probability of a token grew by more than float32 can express since it was sampled"
    text = f"The loss is not finite, although the policy's log-probabilities are. {place}."
    return NonFiniteError(f"{text} {_diverged(config)}")


def gradients_error(policy: Policy, config: GRPOConfig) -> NonFiniteError:
    """Return the error for gradients or a norm that are not finite although the loss is. All ranks call it."""
    named = ((name, parameter.grad) for name, parameter in policy.stored_weights())
    broken = next((name for name, gradient in named if gradient is not None and not _is_finite(gradient)), None)
    place = _first_of_ranks(None if broken is None else f"The gradient of {broken} is not finite")
    place = place or "The norm of the gradients is not finite"
    return NonFiniteError(f"{place}, although the loss is. {_diverged(config)}")


def reference_error(policy: Policy) -> NonFiniteError:
    """Return the error for log-probabilities of the reference policy that are not finite."""
    dtype = str(policy.compute_dtype).removeprefix("torch.")
    remedy = "Name another --reference-path"
    if policy.compute_dtype == torch.float16:
        remedy = "Train with --compute-dtype bfloat16, which has the range of float32"
    return NonFiniteError(f"Log-probabilities of the reference policy, computed in {dtype}, are not finite. {remedy}.")


def critic_error(values: float, norm: float) -> NonFiniteError:
    """Return the error for a critic's loss or gradients that are not finite. All ranks have the same figures."""
    return NonFiniteError(
        f"The loss of the critic is {values:g}, and the norm of its gradients {norm:g}. Start again with a smaller "
        "--ppo.critic-learning-rate, or with rewards on a scale of about 1."
    )


def _diverged(config: GRPOConfig) -> str:
    return f"If the weights have diverged, start again with a smaller {config.flag('learning_rate')}."


def _broken_weight(policy: Policy) -> str | None:
    """Describe the first weight whose shard on this rank is not finite in the dtype of the passes, or return None."""
    for name, weight in policy.stored_weights():
        if not _is_finite(_local(weight).to(policy.compute_dtype)):
            return f"The weight {name} is not finite in that dtype"
    return None


def _broken_module(policy: Policy, batch: MicroBatch, temperature: float) -> str | None:
    """Describe the first module whose output is not finite in this rank's pass.

    Return None if the log-probabilities of the pass are finite.
    """
    found: list[str] = []

    def look(name: str, inputs: Any, output: Any) -> None:
        if found or _is_finite(output):
            return
        known = "" if _is_finite(inputs) else " (its input is not finite either: the operation before it overflows)"
        found.append(f"The first module whose output is not finite is {name}{known}")

    def hook(name: str) -> Any:
        return lambda _, inputs, output: look(name, inputs, output)

    modules: list[tuple[str, nn.Module]] = [(n, m) for n, m in policy.language_model.named_modules() if n]
    handles = [module.register_forward_hook(hook(name)) for name, module in modules]
    try:
        with torch.no_grad():
            logprobs, _ = policy(batch.tokens, batch.positions, temperature, entropy=False)
    finally:
        for handle in handles:
            handle.remove()
    if _is_finite(logprobs):
        return None
    return found[0] if found else "The outputs of all layers are finite, but the logits (lm_head) are not"


def _first_of_ranks(finding: str | None) -> str | None:
    """Return the finding of the first rank that has one, with the number of the rank if there are several ranks."""
    findings: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, finding)
    for rank, text in enumerate(findings):
        if text is not None:
            return text if len(findings) == 1 else f"{text} (on rank {rank} of {len(findings)})"
    return None


def _is_finite(value: Any) -> bool:
    """Return True if all floating-point tensors in `value`, a module's input or output, are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(_local(value).isfinite().all())
    if isinstance(value, Mapping):
        return all(_is_finite(entry) for entry in value.values())
    return not isinstance(value, list | tuple) or all(_is_finite(entry) for entry in value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
