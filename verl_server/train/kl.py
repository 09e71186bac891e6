"""The KL divergence from a reference policy: its estimates for a sampled token, and how it is held down.

With r = reference / policy, the probabilities of the token, the estimates of KL(policy || reference) are

    k1 = -log r             unbiased; negative for half of the tokens or more
    k2 = (log r)^2 / 2      biased, with little variance
    k3 = r - 1 - log r      unbiased, and never negative

Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html. A good estimate of the value need not have
the gradient of the KL (Tang & Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555). For tokens that the
policy itself samples, the mean gradient is

    in the loss     k1: 0, because the mean of grad log policy is 0
                    k2: that of KL(policy || reference), token by token
                    k3: that of KL(reference || policy), token by token. GRPO has k3 (Shao et al. 2024, arXiv
                        2402.03300)
    in the reward   k1: that of KL(policy || reference) over whole episodes, with what a token leads to. PPO for
                        language models has it (Ziegler et al. 2019, arXiv 1909.08593)
                    k2 and k3: that of no KL

So the loss has k2 or k3, and the reward k1; `LossConfig` refuses the others. In the loss, the policy is the one that is
trained; in the reward, the one that sampled the token. `policy_loss` adds the loss. GRPO subtracts the penalty of an
episode (`with_penalties`), PPO that of each turn (`gae.TurnChain.penalized`). The rewards that a run reports stay those
of the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from verl_server.train.batches import Sample, behaviour_logprobs
from verl_server.train.ranks import over_ranks

Estimator = Literal["k1", "k2", "k3"]


def kl_estimates(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate for each token, of the shape and dtype of `logprobs`, and differentiable in it.

    `logprobs` and `reference` [n] are the log-probabilities of sampled tokens under the policy and the reference.
    """
    log_ratio = reference - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.expm1() - log_ratio


def token_penalties(sample: Sample) -> Tensor:
    """Return k1 of each token to train on, fp32 [n], between the weights that sampled it and the reference."""
    assert sample.reference_logprobs is not None
    return kl_estimates(behaviour_logprobs(sample.trajectory), sample.reference_logprobs, "k1")


def with_penalties(samples: Sequence[Sample], coef: float) -> list[Sample]:
    """Return the samples with `coef` times the penalties of their episodes in the advantages. All ranks call it.

    The advantages are rewards minus the mean reward of the group. The penalty of an episode is the sum of
    `token_penalties` over its branches, and enters the comparison as a reward does: minus its mean over the group's
    episodes. The episodes of a group, and the branches of an episode, may be on several ranks.
    """
    rows = [
        (s.trajectory.task.group, s.trajectory.member, s.trajectory.attempt, bool(s.trajectory.session), 1.0, penalty)
        for s, penalty in ((s, float(token_penalties(s).double().sum())) for s in samples)
    ]
    rank, most = dist.get_rank(), int(over_ranks(torch.tensor(len(rows)), dist.ReduceOp.MAX))
    table = torch.zeros((dist.get_world_size(), most, 6), dtype=torch.float64)
    if rows:
        table[rank, : len(rows)] = torch.tensor(rows, dtype=torch.float64)

    penalties: dict[tuple[float, ...], float] = {}
    groups: dict[float, set[tuple[float, ...]]] = {}
    mine: list[tuple[float, ...]] = []
    for number, (group, member, attempt, has_branches, is_row, penalty) in enumerate(
        over_ranks(table).flatten(0, 1).tolist()
    ):
        if is_row:
            # As in `by_episode`: a trajectory without a session is an episode of its own.
            episode = (group, member, attempt) if has_branches else (float(number),)
            penalties[episode] = penalties.get(episode, 0.0) + penalty
            groups.setdefault(group, set()).add(episode)
            if number // most == rank:
                mine.append(episode)
    means = {group: sum(penalties[e] for e in episodes) / len(episodes) for group, episodes in groups.items()}
    return [
        replace(s, advantage=s.advantage - coef * (penalties[episode] - means[s.trajectory.task.group]))
        for s, episode in zip(samples, mine, strict=True)
    ]
