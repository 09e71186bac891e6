"""`TrainedRecord`: keeps what the trainer computes for each trajectory of a step, for trained-rankN.jsonl.

The passes compute it anyway. It stays on the device until the step has ended, so that no pass waits for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_server.rollout.trajectory import Trajectory
from verl_server.train.batches import MicroBatch, Sample, sampled_positions
from verl_server.watch.run_records import TrainedTrajectory
from verl_server.weight_version import WeightVersion

_DECIMALS = 6


class TrainedRecord:
    def __init__(self, correction: float = 0.0) -> None:
        """`correction` is that of `MicroBatch.of`."""
        self._correction = correction
        self._found: dict[int, tuple[Sample, Tensor, Tensor | None, Tensor]] = {}
        """Trajectory -> (sample, log-probabilities, entropy, log-weights) of its trained tokens."""

    def clear(self) -> None:
        """Forget the step before."""
        self._found.clear()

    def note(self, samples: Sequence[Sample], batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Keep the results of a pass over `batch`, which has `samples`. Later passes over a trajectory are ignored.

        `logprobs` and `entropy` [n] fp32 are those of the batch's `positions`.
        """
        start = 0
        for sample in samples:
            rows = slice(start, start + len(sampled_positions(sample.trajectory)))
            start = rows.stop
            own = None if entropy is None else entropy.detach()[rows]
            found = (sample, logprobs.detach()[rows], own, batch.log_weights[rows])
            self._found.setdefault(id(sample.trajectory), found)

    def take(self, step: int, version: str) -> list[TrainedTrajectory]:
        """Return the records of training step `step`, which trained the weights `version`, and forget them."""
        records = [self._record(step, version, *found) for found in self._found.values()]
        self.clear()
        return records

    def _record(
        self,
        step: int,
        version: str,
        sample: Sample,
        logprobs: Tensor,
        entropy: Tensor | None,
        log_weights: Tensor,
    ) -> TrainedTrajectory:
        trajectory = sample.trajectory
        weights = log_weights.exp().clamp(max=self._correction) if self._correction > 0 else torch.ones(0)
        return TrainedTrajectory(
            step=step,
            sampled_step=step,
            group=trajectory.task.group,
            member=trajectory.member,
            session=trajectory.session,
            branch=trajectory.branch,
            advantage=sample.advantage,
            age=age_of(trajectory, version),
            positions=sampled_positions(trajectory).tolist(),
            logprobs=_numbers(logprobs),
            entropy=[] if entropy is None else _numbers(entropy),
            loss_weights=_numbers(weights) if (weights != 1).any() else [],
        )


def age_of(trajectory: Trajectory, version: str) -> int | None:
    """Return the number of the label `version` minus that of the oldest sampled token's version.

    Return None if no token was sampled, or if a version is a free label or of another incarnation.
    """
    trained = WeightVersion.parse(version)
    sampled = [WeightVersion.parse(label) for label in dict.fromkeys(trajectory.weight_versions) if label]
    if trained is None:
        return None
    known = [each for each in sampled if each is not None and each.incarnation == trained.incarnation]
    return trained.number - min(known).number if known and len(known) == len(sampled) else None


def _numbers(values: Tensor) -> list[float | None]:
    """Return rounded numbers, with None for those that are not finite."""
    rounded = values.double().cpu().round(decimals=_DECIMALS)
    if rounded.isfinite().all():
        return list(rounded.tolist())
    return [value if math.isfinite(value) else None for value in rounded.tolist()]
