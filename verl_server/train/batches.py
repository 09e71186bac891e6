"""Micro-batches: packs trajectories into tensors whose size, including padding, stays within a token budget.

`PolicyTrainer` packs the trajectories of each optimizer step. Trajectories of similar length share a micro-batch, so
that little of it is padding.

The probability ratio of a token is computed with the log-probability of the policy itself, even if the token was drawn
under a mask, a penalty or a bias. If a mask allowed only one token, this token carries no information about the policy,
and is not trained on. A token whose record does not have the log-probability of the policy is refused (`check_usable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.ranks import over_ranks


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory to learn from."""

    trajectory: Trajectory
    advantage: float
    """The advantage of each token, or the mean of `token_advantages`."""
    proximal_logprobs: Tensor | None = field(default=None, compare=False)
    """[n] fp32: log-probabilities of the tokens to train on under the trainer's weights before the first optimizer step
    on this batch. None: nothing needs them, or the present weights are those."""
    sampled_step: int | None = field(default=None, compare=False)
    """Step in which the trajectory was begun. None: the step that trains it."""
    token_advantages: Tensor | None = field(default=None, compare=False)
    """[n] fp32: the advantage of each token to train on. None: `advantage` for all of them."""
    reference_logprobs: Tensor | None = field(default=None, compare=False)
    """[n] fp32 on the CPU: log-probabilities of the tokens to train on under the reference policy. None: there is
    none."""

    def __post_init__(self) -> None:
        check_usable([self.trajectory])


def check_usable(trajectories: Sequence[Trajectory], temperature: float | None = None) -> None:
    """Raise BadRequestError if the log-probability of a token to train on is not that of the policy at `temperature`.

    None permits any temperature. If a turn has no recorded temperature, it was sampled at the trainer's temperature.
    """
    for trajectory in trajectories:
        mask = trajectory.trained_mask
        for number, turn in enumerate(trajectory.turns):
            if not any(mask[slice(*turn.action_span)]):
                continue
            place = f"Turn {number} of {trajectory.session or trajectory.task.episode_id or 'an episode'}"
            if turn.policy_logprobs == "unknown":
                shaped = [f"{name}={value!r:.80}" for name, value in turn.sampling.items()] or ["unknown settings"]
                raise BadRequestError(
                    f"{place} cannot be trained on: it was sampled with {', '.join(shaped)}, and its record does "
                    "not have the log-probabilities of the policy. Sample without masks, penalties, bias and filters, "
                    "or on a server whose own engine samples: it reports them."
                )
            sampled_at = turn.sampling.get("temperature")
            if temperature is not None and sampled_at is not None and sampled_at != temperature:
                raise BadRequestError(
                    f"{place} cannot be trained on: it was sampled at the temperature {sampled_at:g}, and the trainer "
                    f"computes log-probabilities at {temperature:g}."
                )


@dataclass(slots=True)
class MicroBatch:
    """The samples of one forward pass. The last tensors concatenate the trained tokens of all rows."""

    tokens: Tensor
    """[rows, length] int64, padded with 0 on the right."""
    positions: Tensor
    """[n] int64: indices of the tokens to train on in the flattened `tokens`."""
    behaviour_logprobs: Tensor
    """[n] fp32: the policy's log-probabilities of these tokens, as the server computed them with the samples."""
    advantages: Tensor
    """[n] fp32: the advantage of each token, times its correction if there is one."""
    log_weights: Tensor
    """[n] fp32: log of (probability under the policy / probability under the edited distribution, before top-k, top-p
    and min-p). 0 for a token that was drawn without mask, penalty and bias; with a mask alone, it is the log of the
    mass that the policy gives to the allowed tokens."""
    proximal_logprobs: Tensor | None = None
    """[n] fp32: those of the samples (`Sample.proximal_logprobs`), or None."""
    reference_logprobs: Tensor | None = None
    """[n] fp32: those of the samples (`Sample.reference_logprobs`), or None."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device, correction: float = 0.0) -> MicroBatch:
        """Return `samples`, padded, as a batch on `device`.

        `correction` > 0 multiplies the advantage of each token with exp(log_weights), at most `correction`. This is
        truncated importance sampling for tokens that were drawn from an edited distribution. Without samples, the batch
        has two tokens of which none was sampled, so its gradients are 0.
        """
        length = max((len(sample.trajectory.tokens) for sample in samples), default=2)
        tokens = torch.zeros((max(1, len(samples)), length), dtype=torch.long)
        positions = [torch.zeros(0, dtype=torch.long)]
        logprobs, reported, advantages = [torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0)]
        for row, sample in enumerate(samples):
            trajectory = sample.trajectory
            tokens[row, : len(trajectory.tokens)] = torch.tensor(trajectory.tokens)
            sampled = sampled_positions(trajectory)
            positions.append(sampled + row * length)
            own = torch.tensor(trajectory.logprobs)[sampled]
            reported.append(own)
            logprobs.append(behaviour_logprobs(trajectory) if trajectory.policy_logprobs else own)
            alike = torch.full((len(sampled),), sample.advantage)
            advantages.append(alike if sample.token_advantages is None else sample.token_advantages)
        proximal = [sample.proximal_logprobs for sample in samples if sample.proximal_logprobs is not None]
        reference = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
        weights = torch.cat(logprobs) - torch.cat(reported)
        scaled = torch.cat(advantages)
        if correction > 0:
            scaled = scaled * weights.exp().clamp(max=correction)
        flat = (tensor.to(device) for tensor in (torch.cat(positions), torch.cat(logprobs), scaled, weights))
        batch = cls(tokens.to(device), *flat)
        if proximal:
            batch.proximal_logprobs = torch.cat(proximal).to(device)
        if reference:
            batch.reference_logprobs = torch.cat(reference).to(device)
        return batch


def behaviour_logprobs(trajectory: Trajectory) -> Tensor:
    """Return the log-probabilities of the tokens to train on under the weights that sampled them, fp32 [n].

    They are those of the policy itself, also if the token was drawn under a mask, a penalty or a bias. `check_usable`
    found them to be known.
    """
    positions = sampled_positions(trajectory)
    if not trajectory.policy_logprobs:
        return torch.tensor(trajectory.logprobs)[positions]
    return torch.tensor([trajectory.policy_logprobs[position] for position in positions.tolist()])


def sampled_positions(trajectory: Trajectory) -> Tensor:
    """Return the positions of the tokens to train on, int64 [n]. The first token, which has no context, is left out."""
    mask = torch.tensor(trajectory.trained_mask, dtype=torch.bool)
    mask[:1] = False
    return mask.nonzero().squeeze(1)


class HasTrajectory(Protocol):
    """A sample of the policy or of a critic."""

    @property
    def trajectory(self) -> Trajectory: ...


Packed = TypeVar("Packed", bound=HasTrajectory)


def pack(samples: Sequence[Packed], token_budget: int) -> list[list[Packed]]:
    """Divide the samples, the longest first, into micro-batches with rows x longest row <= `token_budget`.

    There are as few micro-batches as this order permits. A sample that is longer than the budget gets a micro-batch of
    its own.
    """
    batches: list[list[Packed]] = []
    room = 0
    for sample in sorted(samples, key=lambda sample: len(sample.trajectory.tokens), reverse=True):
        if room == 0:
            batches.append([])
            room = max(1, token_budget // max(1, len(sample.trajectory.tokens)))
        batches[-1].append(sample)
        room -= 1
    return batches


def pack_alike(samples: Sequence[Packed], token_budget: int) -> list[list[Packed]]:
    """Return this rank's micro-batches. All ranks call it, and get the same number of them: ranks run passes together.

    A rank with fewer micro-batches gets empty ones.
    """
    packed = pack(samples, token_budget)
    return packed + [[]] * (int(over_ranks(torch.tensor(len(packed)), dist.ReduceOp.MAX)) - len(packed))
