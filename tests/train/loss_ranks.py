"""Two optimizer steps with each loss on each rank's share of the same trajectories, with a file for the result.

`python -m tests.train.loss_ranks MODEL FILE` writes name -> (losses, weights after the steps), on one rank or several.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.train.conftest import make_trajectory
from verl_server.train.batches import Sample
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import setup_ranks

# One minibatch, so that the optimizer steps have the same trajectories however they spread over ranks. The budget makes
# several micro-batches; the last rank has fewer of them than the first.
_COMMON: dict[str, Any] = {"epochs": 2, "minibatches": 1, "warmup_steps": 0, "micro_batch_tokens": 16}
_MASKS: dict[str, Any] = {"token_mask": (0.2, 5.0), "sequence_mask": (0.5, 3.0)}
CONFIGS = {
    "clip_behaviour": GRPOConfig(**_COMMON),
    "tis": GRPOConfig(loss="tis", **_COMMON),
    "decoupled": GRPOConfig(loss="decoupled", **_COMMON),
    "unclipped": GRPOConfig(loss="unclipped", **_COMMON),
    "clip_behaviour, masks": GRPOConfig(**_COMMON, **_MASKS),
    "tis, masks": GRPOConfig(loss="tis", **_COMMON, **_MASKS),
}


def make_samples() -> list[Sample]:
    """Return trajectories whose tokens have various probabilities under the weights that sampled them."""
    draw = random.Random(0)
    samples = []
    for number in range(7):
        trajectory = make_trajectory(0, 1.0, 2 + number % 4, seed=number)
        length = len(trajectory.tokens) - 2
        trajectory.logprobs[2:] = [draw.gauss(-3.5, 1.0) for _ in range(length)]
        samples.append(Sample(trajectory, 0.5 if number % 3 else -0.7))
    return samples


def main(model: str, file: str) -> None:
    device = setup_ranks("cpu")
    found = {}
    for name, config in CONFIGS.items():
        trainer = PolicyTrainer(load_policy(model, device, compute_dtype=torch.float32), config, 10, device)
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=0.1)
        # The last rank has two of seven trajectories.
        mine = [s for i, s in enumerate(make_samples()) if dist.get_world_size() == 1 or (i > 4) == dist.get_rank()]
        learned = trainer.update(mine, 0)
        found[name] = (learned.losses, weights_of(trainer))
    if dist.get_rank() == 0:
        torch.save(found, file)
    dist.destroy_process_group()


def weights_of(trainer: PolicyTrainer) -> torch.Tensor:
    """All weights, in the order of their names: fp32 [number of parameters]."""
    named = sorted(trainer.policy.named_weights())
    return torch.cat(
        [getattr(weight, "full_tensor", lambda w=weight: w)().detach().flatten().clone() for _, weight in named]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
