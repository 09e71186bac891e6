"""PPO with a critic, on one page: values of turns, advantages by GAE, clipped steps of the policy, steps of the critic.

    python -m verl_server.train.ppo --model-path MODEL --env-url http://HOST:PORT

An action of the policy is a turn: all the tokens that it sampled there. The critic estimates, from the tokens before
the action, how much reward follows. The advantage of a turn is what came out beyond that estimate, and all its tokens
have it. GRPO needs no critic, because it compares the episodes of a group; PPO needs no groups, learns from each
episode by itself, and tells a good turn of an episode from a bad one.

    1. Play episodes with the present weights.                             `grpo.GRPO`
    2. V_t: the critic's value of the state before each turn.              `critic_trainer`
    3. Advantages and returns of the turns, from rewards and V.            `gae`, `kl`
    4. Train the critic to say the returns, with clipped values.           `critic_trainer`, `losses.value_loss`
    5. Train the policy on the advantages, with a clipped ratio.           `grpo.PolicyTrainer`, `losses.policy_loss`
    6. Push the policy's weights into the rollout servers.                 `grpo.GRPO`

Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv 1707.06347. This file has 2 to 5. What surrounds
them is the same in GRPO: the run with its exit statuses, episodes on healed servers, packing, losses of the policy,
checkpoints, metrics. To change the algorithm, copy this file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from verl_server.rollout.trajectory import Trajectory
from verl_server.train import run
from verl_server.train.batches import Sample
from verl_server.train.critic import Critic, load_critic
from verl_server.train.critic_trainer import CriticTrainer, States, Targets, describe_values
from verl_server.train.gae import TurnChain, gae, padded
from verl_server.train.grpo import GRPO, PolicyTrainer, open_synchronous
from verl_server.train.kl import token_penalties
from verl_server.train.metrics import Learned
from verl_server.train.policy import Policy
from verl_server.train.ppo_options import AsyncPPOTrainArgs, PPOConfig, PPOTrainArgs
from verl_server.train.ranks import over_ranks
from verl_server.train.reference import Reference
from verl_server.train.run import RunParts


class PPOTrainer(PolicyTrainer):
    """Policy and critic with their optimizers; under torchrun, the shards of one rank."""

    config: PPOConfig

    def __init__(
        self,
        policy: Policy,
        critic: Critic,
        config: PPOConfig,
        steps: int,
        device: torch.device,
        reference: Reference | None = None,
    ) -> None:
        """Take the critic, and what `PolicyTrainer` takes."""
        super().__init__(policy, config, steps, device, reference)
        self.critic = CriticTrainer(critic, config, self.steps, device)
        self.state.models["critic"] = critic, self.critic.optimizer

    def samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Return all trajectories with a reward and a token to train on. `update` gives them advantages."""
        return [Sample(trajectory, 0.0) for trajectory in trajectories if trajectory.is_trainable]

    def update(self, samples: Sequence[Sample], step: int) -> Learned:
        """Train critic and policy on this rank's samples of a step; in the first steps, the critic alone.

        All ranks call it, and at least one rank has a sample. Raise errors as `PolicyTrainer.update` does.
        """
        config = self.config
        samples, figures = self.compare_with_reference(samples)
        chains = [TurnChain.of(sample.trajectory) for sample in samples]
        if config.has_kl_reward:
            chains = [c.penalized(config.kl_coef * token_penalties(s)) for c, s in zip(chains, samples, strict=True)]
        states = [States(s.trajectory, chain.states) for s, chain in zip(samples, chains, strict=True)]
        values = self.critic.values(states)
        rewards = padded([chain.rewards for chain in chains])
        advantages, returns = gae(rewards, padded(values), config.gamma, config.gae_lambda)

        own = [chain.is_own for chain in chains]
        targets = [
            Targets(s.trajectory, chain.states[mask], value[mask], found[: len(mask)][mask])
            for s, chain, mask, value, found in zip(samples, chains, own, values, returns, strict=True)
        ]
        figures |= describe_values(_joined([t.values for t in targets]), _joined([t.returns for t in targets]))
        learned = self.critic.update(targets, step)
        learned.losses |= figures
        if step < config.critic_warmup_steps:
            return learned

        if config.normalize_std:
            advantages = whiten(advantages, padded([mask.float() for mask in own]))
        weighed = []
        for sample, chain, row in zip(samples, chains, advantages, strict=True):
            of_tokens = row[chain.turn_of_token]
            weighed.append(replace(sample, advantage=float(of_tokens.mean()), token_advantages=of_tokens))
        return _together(self.optimize(weighed, step), learned)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the advantages with mean 0 and standard deviation 1 over the turns of all ranks. All ranks call it.

    Both are fp32 of one shape; only turns whose `mask` is 1 count.
    """
    ours = advantages.double()
    sums = torch.stack([mask.double().sum(), (ours * mask).sum(), (ours.square() * mask).sum()])
    count, total, squares = over_ranks(sums).tolist()
    mean = total / max(1.0, count)
    variance = max(0.0, squares / max(1.0, count) - mean**2)
    whitened: Tensor = (advantages - mean) / (math.sqrt(variance) + 1e-8)
    return whitened


def _together(policy: Learned, critic: Learned) -> Learned:
    return Learned(
        policy.losses | critic.losses,
        policy.tokens + critic.tokens,
        policy.padded_tokens + critic.padded_tokens,
        policy.optimizer_steps + critic.optimizer_steps,
        policy.skipped_optimizer_steps,
        policy.learning_rate,
    )


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *rows])


def make_ppo_trainer(args: PPOTrainArgs | AsyncPPOTrainArgs, parts: RunParts) -> PPOTrainer:
    """Load the critic of a run beside its policy."""
    critic = load_critic(
        args.critic_path or args.model_path,
        "--model-path" if args.critic_path is None else "--critic-path",
        parts.device,
        vocabulary=parts.policy.language_model.config.vocab_size,
        compute_dtype=parts.policy.compute_dtype,
        gradient_checkpointing=args.gradient_checkpointing,
    )
    return PPOTrainer(parts.policy, critic, args.grpo, args.steps, parts.device, parts.reference)


def open_ppo(args: PPOTrainArgs, parts: RunParts) -> AbstractContextManager[GRPO]:
    """Return the algorithm of a run with the options `args`, to be opened."""
    return open_synchronous(args, parts, make_ppo_trainer(args, parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run.main("python -m verl_server.train.ppo", PPOTrainArgs, open_ppo, argv)


if __name__ == "__main__":
    sys.exit(main())
