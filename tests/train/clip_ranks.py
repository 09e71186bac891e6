"""One clipped optimizer step on each rank's share of `SAMPLES`, on one rank or on several, with a file for the result.

`python -m tests.train.clip_ranks MODEL FILE` writes the norm of the gradients and all weights before and after.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tests.train.conftest import make_trajectory
from verl_server.train.batches import Sample
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import setup_ranks

MAX_NORM = 0.05
SAMPLES = [Sample(make_trajectory(0, 1.0, 2 + i % 4, seed=i), 0.5 if i % 3 else -0.7) for i in range(9)]


def main(model: str, file: str) -> None:
    device = setup_ranks("cpu")
    config = GRPOConfig(
        groups=2, group_size=4, epochs=1, minibatches=1, warmup_steps=1, learning_rate=1.0, max_grad_norm=MAX_NORM
    )
    trainer = PolicyTrainer(load_policy(model, device, compute_dtype=torch.float32), config, 10, device)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
    before = _weights(trainer)
    learned = trainer.update(SAMPLES[dist.get_rank() :: dist.get_world_size()], 0)
    after = _weights(trainer)
    if dist.get_rank() == 0:
        torch.save({"norm": learned.losses["grad_norm"], "before": before, "after": after}, file)
    dist.destroy_process_group()


def _weights(trainer: PolicyTrainer) -> torch.Tensor:
    """All weights, in the order of their names: fp32 [number of parameters]."""
    named = sorted(trainer.policy.named_weights())
    return torch.cat(
        [getattr(weight, "full_tensor", lambda w=weight: w)().detach().flatten().clone() for _, weight in named]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
