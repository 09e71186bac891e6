"""Steps with a reference policy on each rank's share of the same trajectories, with a file for the result.

`python -m tests.train.reference_ranks MODEL REFERENCE FILE` writes name -> (losses, weights), on one rank or several.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.train.conftest import make_trajectory
from tests.train.loss_ranks import weights_of
from verl_server.files.model_folder import load_tokenizer
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.critic import load_critic
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.policy import Policy, load_policy
from verl_server.train.ppo import PPOTrainer
from verl_server.train.ppo_options import PPOConfig, PPOTrainArgs
from verl_server.train.ranks import setup_ranks
from verl_server.train.reference import Reference, load_reference

_COMMON: dict[str, Any] = {"epochs": 1, "minibatches": 1, "warmup_steps": 0, "micro_batch_tokens": 16, "kl_coef": 0.5}
CONFIGS: dict[str, GRPOConfig] = {
    "k3": GRPOConfig(**_COMMON),
    "k2": GRPOConfig(kl_estimator="k2", **_COMMON),
    "reward": GRPOConfig(kl_in="reward", **_COMMON),
    "ppo reward": PPOConfig(kl_in="reward", **_COMMON),
}


def make_trajectories() -> list[Trajectory]:
    """Return two groups: one with rewards that differ, and one with equal rewards. Two are branches of one episode."""
    found = []
    for number in range(7):
        trajectory = make_trajectory(number % 2, float(number % 4 == 0), 2 + number % 4, seed=number)
        trajectory.member = number
        found.append(trajectory)
    for branch in (3, 5):
        found[branch].session, found[branch].member = "agent", 3
    return found


def reference_of(model: str, path: str, config: GRPOConfig, policy: Policy) -> Reference:
    kind = PPOTrainArgs if isinstance(config, PPOConfig) else TrainArgs
    args = kind(model, reference_path=path, env_url="http://e", grpo=config)  # type: ignore[arg-type]
    reference = load_reference(args, policy, load_tokenizer(model, "--model-path"), torch.device("cpu"))
    assert reference is not None
    return reference


def make_trainer(model: str, path: str, config: GRPOConfig, dtype: torch.dtype = torch.float32) -> PolicyTrainer:
    device = torch.device("cpu")
    policy = load_policy(model, device, compute_dtype=dtype)
    reference = reference_of(model, path, config, policy)
    if isinstance(config, PPOConfig):
        critic = load_critic(model, "--model-path", device, vocabulary=40, compute_dtype=dtype)
        return PPOTrainer(policy, critic, config, 10, device, reference)
    return PolicyTrainer(policy, config, 10, device, reference)


def main(model: str, path: str, file: str) -> None:
    setup_ranks("cpu")
    found = {}
    for name, config in CONFIGS.items():
        trainer = make_trainer(model, path, config)
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=0.1)
        # The advantages are those of whole groups, which are then divided over the ranks, as asynchronous runs do.
        samples = trainer.samples(make_trajectories())
        mine = [s for i, s in enumerate(samples) if dist.get_world_size() == 1 or (i > 4) == dist.get_rank()]
        learned = trainer.update(mine, 0)
        found[name] = (learned.losses, weights_of(trainer))
        shards = [getattr(p, "to_local", lambda p=p: p)() for p in trainer.reference.policy.parameters()]
        assert all(not p.requires_grad for p in trainer.reference.policy.parameters())
        whole = sum(p.numel() for p in trainer.reference.policy.parameters())
        assert sum(s.numel() for s in shards) <= whole / dist.get_world_size() * 1.05, "it is sharded"
    if dist.get_rank() == 0:
        torch.save(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
