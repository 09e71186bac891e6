"""Packing of trajectories into tensors: micro-batches whose size, padding included, stays within a token budget.

`PolicyTrainer` packs the trajectories of each optimizer step. Trajectories of similar length share a micro-batch, so
little of it is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_server.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory to learn from."""

    trajectory: Trajectory
    advantage: float


@dataclass(slots=True)
class MicroBatch:
    """The samples of one forward pass. The last three tensors concatenate the sampled tokens of all rows."""

    tokens: Tensor
    """[rows, length] int64, padded with 0 on the right."""
    positions: Tensor
    """[n] int64: indices of the sampled tokens in the flattened `tokens`."""
    behaviour_logprobs: Tensor
    """[n] fp32: the log-probabilities that the server returned with the sampled tokens."""
    advantages: Tensor
    """[n] fp32: the advantage of each sampled token's trajectory."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> MicroBatch:
        """Pad `samples` to a batch on `device`.

        Without samples, the batch has two tokens of which none was sampled, so its gradients are 0.
        """
        length = max((len(sample.trajectory.tokens) for sample in samples), default=2)
        tokens = torch.zeros((max(1, len(samples)), length), dtype=torch.long)
        positions = [torch.zeros(0, dtype=torch.long)]
        logprobs, advantages = [torch.zeros(0)], [torch.zeros(0)]
        for row, sample in enumerate(samples):
            trajectory = sample.trajectory
            tokens[row, : len(trajectory.tokens)] = torch.tensor(trajectory.tokens)
            sampled = sampled_positions(trajectory)
            positions.append(sampled + row * length)
            logprobs.append(torch.tensor(trajectory.logprobs)[sampled])
            advantages.append(torch.full((len(sampled),), sample.advantage))
        flat = (torch.cat(tensors).to(device) for tensors in (positions, logprobs, advantages))
        return cls(tokens.to(device), *flat)


def sampled_positions(trajectory: Trajectory) -> Tensor:
    """Positions of the tokens that are trained on, int64 [n]. The first token, which has no context, is never one."""
    mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    mask[:1] = False
    return mask.nonzero().squeeze(1)


def pack(samples: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """Divide the samples, the longest first, into micro-batches with rows x longest row <= `token_budget`.

    There are as few micro-batches as this order permits. A sample that is longer than the budget gets a micro-batch of
    its own.
    """
    batches: list[list[Sample]] = []
    room = 0
    for sample in sorted(samples, key=lambda sample: len(sample.trajectory.tokens), reverse=True):
        if room == 0:
            batches.append([])
            room = max(1, token_budget // max(1, len(sample.trajectory.tokens)))
        batches[-1].append(sample)
        room -= 1
    return batches
