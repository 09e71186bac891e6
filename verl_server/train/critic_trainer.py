"""`CriticTrainer`: the critic and its optimizer. It gives values of states, and learns the returns that followed.

`ppo.PPOTrainer` has one. Under torchrun, every rank has its shards of the critic and its own trajectories, as the
policy's trainer has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from verl_server.rollout.trajectory import Trajectory
from verl_server.train.batches import pack_alike
from verl_server.train.critic import Critic
from verl_server.train.finite_check import critic_error
from verl_server.train.losses import value_loss
from verl_server.train.metrics import Learned
from verl_server.train.ppo_options import PPOConfig
from verl_server.train.ranks import full, over_ranks
from verl_server.train.run_end import StepCounter


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """States of one trajectory."""

    trajectory: Trajectory
    positions: Tensor
    """[turns] int64: position of the last token of each state."""


@dataclass(frozen=True, slots=True, eq=False)
class Targets(States):
    """States of one trajectory that the critic is trained on."""

    values: Tensor
    """[turns] fp32: the critic's values before the first optimizer step of the batch."""
    returns: Tensor
    """[turns] fp32: what it should have said."""


class CriticTrainer:
    def __init__(self, critic: Critic, config: PPOConfig, steps: StepCounter, device: torch.device) -> None:
        """Take the counter of the policy's optimizer steps, which counts those of the critic with them."""
        self.critic = critic
        self.config = config
        self.device = device
        self.steps = steps
        self.optimizer = torch.optim.AdamW(
            critic.parameters(), config.critic_learning_rate, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )

    def values(self, samples: Sequence[States]) -> list[Tensor]:
        """Return the values of the states of each sample, fp32 [turns] on the CPU. All ranks call it."""
        known: dict[int, Tensor] = {}
        for rows in pack_alike(samples, self.config.micro_batch_tokens):
            with torch.no_grad():
                values: Tensor = self._values(rows).cpu()
            counts = [len(sample.positions) for sample in rows]
            known |= {id(sample): own for sample, own in zip(rows, torch.split(values, counts), strict=True)}
        return [known[id(sample)] for sample in samples]

    def update(self, samples: Sequence[Targets], step: int) -> Learned:
        """Train on this rank's samples of a step. All ranks call it, and at least one rank has a sample.

        Raise NonFiniteError on all ranks, before an optimizer step that would break the weights.
        """
        config = self.config
        most = int(over_ranks(torch.tensor(len(samples)), dist.ReduceOp.MAX))
        # The order is a function of the step, so that a resumed run trains in the same order.
        shuffle = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        results = []
        for _ in range(config.epochs):
            for rows in torch.randperm(len(samples), generator=shuffle).tensor_split(min(config.minibatches, most)):
                results.append(self._optimizer_step([samples[row] for row in rows.tolist()], step))
        return Learned.over(results)

    def _optimizer_step(self, minibatch: Sequence[Targets], step: int) -> Learned:
        """Take one optimizer step on the mean loss over the states of all ranks."""
        packed = pack_alike(minibatch, self.config.micro_batch_tokens)
        lengths = [len(sample.trajectory.tokens) for sample in minibatch]
        padded = sum(len(rows) * len(rows[0].trajectory.tokens) for rows in packed if rows)
        states = sum(len(sample.positions) for sample in minibatch)
        counts = over_ranks(torch.tensor([states, sum(lengths), padded], dtype=torch.int64)).tolist()
        mean = 1 / max(1, counts[0])
        total = torch.zeros((), device=self.device)
        for rows in packed:
            before, returns = (_joined([getattr(row, name) for row in rows]) for name in ("values", "returns"))
            loss = value_loss(
                self._values(rows), before.to(self.device), returns.to(self.device), self.config.value_clip
            )
            # FSDP averages gradients over ranks; the loss is a mean over the states of all ranks.
            (loss * (dist.get_world_size() * mean)).backward()
            total += loss.detach()
        norm = get_total_norm([p.grad for p in self.critic.parameters() if p.grad is not None])
        figures = torch.stack([total, full(norm) / dist.get_world_size()]).cpu()
        value, grad_norm = over_ranks(figures).tolist()
        if not math.isfinite(value) or not math.isfinite(grad_norm):
            raise critic_error(value * mean, grad_norm)
        clip_grads_with_norm_(self.critic.parameters(), self.config.max_grad_norm, norm)
        with self.steps.step(step):
            self.optimizer.step()
        self.optimizer.zero_grad()
        losses = {"value_loss": value * mean, "value_grad_norm": grad_norm}
        return Learned(losses, counts[1], counts[2], 1)

    def _values(self, rows: Sequence[States]) -> Tensor:
        """Return the values of the states of all rows, fp32 [n], from one pass. Without rows, n is 0."""
        length = max((len(row.trajectory.tokens) for row in rows), default=1)
        tokens = torch.zeros((max(1, len(rows)), length), dtype=torch.long)
        positions = [torch.zeros(0, dtype=torch.long)]
        for number, row in enumerate(rows):
            tokens[number, : len(row.trajectory.tokens)] = torch.tensor(row.trajectory.tokens)
            positions.append(row.positions + number * length)
        values: Tensor = self.critic(tokens.to(self.device), torch.cat(positions).to(self.device))
        return values


def describe_values(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Return mean value, mean return and explained variance over the turns of all ranks, whose own are fp32 [n] each.

    The explained variance is 1 - Var(returns - values) / Var(returns): 1 for a critic that knows all returns, 0 for one
    that says the same of all states. It is left out if all returns are equal.
    """
    ours = [returns.double(), values.double(), (returns - values).double()]
    sums = [
        torch.tensor(float(len(returns)), dtype=torch.float64),
        *(x.sum() for x in ours),
        *(x.square().sum() for x in ours),
    ]
    count, returned, valued, missed, returned2, _, missed2 = over_ranks(torch.stack(sums)).tolist()
    mean, spread = returned / count, returned2 / count - (returned / count) ** 2
    figures = {"value": valued / count, "return": mean}
    if spread > 1e-12:
        figures["explained_variance"] = 1 - (missed2 / count - (missed / count) ** 2) / spread
    return figures


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *rows])
