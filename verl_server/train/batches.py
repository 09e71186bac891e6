"""From trajectories to tensors: micro-batches whose padded size stays within a token budget.

`PolicyTrainer` packs the trajectories of each optimizer step. Trajectories of similar length share a micro-batch, so
little of it is padding, and the size counts the padding.
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
    """The samples of one forward pass. The sampled tokens of all rows follow each other in the last three tensors."""

    tokens: Tensor
    """[rows, length] int64, padded with 0 on the right."""
    positions: Tensor
    """[n] int64: where the sampled tokens are in the flattened `tokens`."""
    behaviour_logprobs: Tensor
    """[n] fp32: what the server said when it sampled them."""
    advantages: Tensor
    """[n] fp32."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> MicroBatch:
        """No samples make a batch of two tokens of which none was sampled: its gradients are 0."""
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
    """Positions of the tokens that are trained on, int64. The first token follows nothing, so it is none of them."""
    mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    mask[:1] = False
    return mask.nonzero().squeeze(1)


def pack(samples: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """The samples in as few micro-batches as rows x longest row <= `token_budget` permits, the longest first.

    A sample that is longer than the budget gets a micro-batch of its own.
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
