"""Log-probabilities of sampled tokens under a policy, in passes without gradients.

`PolicyTrainer` asks for those of the proximal policy and for the gap to the server, `Reference` for those of the
reference policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_server.logprob_gap import LogprobGap
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.batches import MicroBatch, Sample, pack, pack_alike, sampled_positions
from verl_server.train.finite_check import logprobs_error
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import Policy
from verl_server.train.ranks import over_ranks


def logprobs_of(policy: Policy, samples: Sequence[Sample], config: GRPOConfig, device: torch.device) -> list[Tensor]:
    """Return the log-probabilities that `policy` gives the tokens to train on of each sample. All ranks call it.

    Each is fp32 [n] on `device`, without a gradient, at the temperature of training. The passes are packed as those of
    the training.
    """
    known: dict[int, Tensor] = {}
    for rows in pack_alike(samples, config.micro_batch_tokens):
        batch = MicroBatch.of(rows, device)
        with torch.no_grad():
            logprobs, _ = policy(batch.tokens, batch.positions, config.temperature, entropy=False)
        counts = [len(sampled_positions(sample.trajectory)) for sample in rows]
        known |= {id(sample): own for sample, own in zip(rows, logprobs.split(counts), strict=True)}
    return [known[id(sample)] for sample in samples]


def gap_of_sampled(
    policy: Policy, trajectories: Sequence[Trajectory], version: str, config: GRPOConfig, device: torch.device
) -> LogprobGap | None:
    """Return the gap between the server's and the policy's log-probabilities of tokens sampled under `version`.

    All ranks call it while the policy holds that version. It compares the longest trajectories of each rank, as many as
    fit one forward pass. Return None if no rank has such a token. Raise NonFiniteError if a log-probability that the
    policy computes is not finite.
    """
    samples = [Sample(t, 0.0) for t in trajectories if t.is_trainable]
    packed = (pack(samples, config.micro_batch_tokens) or [[]])[0]
    batch = MicroBatch.of(packed, device)
    # A token that was not drawn from the distribution of this model (forced, masked) is compared, too.
    comparable = [
        sample.trajectory.weight_versions[position] == version
        for sample in packed
        for position in sampled_positions(sample.trajectory).tolist()
    ]
    with torch.no_grad():
        logprobs, _ = policy(batch.tokens, batch.positions, config.temperature, entropy=False)
    gap = LogprobGap.of(batch.behaviour_logprobs, logprobs, torch.tensor(comparable, dtype=torch.bool))
    sums, largest = LogprobGap.sums(gap)
    is_broken = not logprobs.isfinite().all()
    *total, broken = over_ranks(torch.tensor([*sums, float(is_broken)], dtype=torch.float64)).tolist()
    if broken:
        raise logprobs_error(policy, batch, config)
    return LogprobGap.from_sums(total, float(over_ranks(torch.tensor(largest), dist.ReduceOp.MAX)))
