"""`TrainedRecord`: keeps what the trainer computes for each trajectory of a step, for trained-rankN.jsonl.

The passes compute it anyway. It stays on the device until the step has ended, so that no pass waits for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_server.rollout.trajectory import Trajectory
from verl_server.train.ancestors import Ancestors
from verl_server.train.batches import MicroBatch, Sample
from verl_server.train.losses import token_factors
from verl_server.train.options import GRPOConfig
from verl_server.watch.run_records import TrainedTrajectory
from verl_server.weight_version import WeightVersion

_DECIMALS = 6


@dataclass(frozen=True)
class _Pass:
    """The results of one forward pass: [n] fp32 for the trained tokens of all samples."""

    samples: Sequence[Sample]
    logprobs: Tensor
    entropy: Tensor | None
    factors: Tensor
    distances: Tensor
    """From the policy's log-probabilities at sampling time."""


class TrainedRecord:
    def __init__(self, config: GRPOConfig) -> None:
        self.ancestors = Ancestors()
        """The earlier starts of the run, for ages."""
        self._config = config
        self._passes: list[_Pass] = []
        self._seen: set[int] = set()

    def clear(self) -> None:
        """Forget the step before."""
        self._passes.clear()
        self._seen.clear()

    def note(self, samples: Sequence[Sample], batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Keep the results of a pass over `batch`, which has `samples`, unless all of them had one before.

        `logprobs` and `entropy` [n] fp32 are those of the batch's `positions`.
        """
        new = {id(sample.trajectory) for sample in samples} - self._seen
        if new:
            self._seen |= new
            own = None if entropy is None else entropy.detach()
            factors, _ = token_factors(logprobs.detach(), batch, self._config)
            if (bound := self._config.correction_bound) > 0:  # as in `MicroBatch.of`
                factors = factors * batch.log_weights.exp().clamp(max=bound)
            distances = (logprobs.detach() - batch.behaviour_logprobs).abs()
            self._passes.append(_Pass(samples, logprobs.detach(), own, factors, distances))

    def take(self, step: int, version: str) -> list[TrainedTrajectory]:
        """Return the records of training step `step`, which trained the weights `version`, and forget them."""
        records: dict[int, TrainedTrajectory] = {}
        for found in self._passes:
            for sample, record in self._records(found, step, version):
                records.setdefault(id(sample.trajectory), record)
        self.clear()
        return list(records.values())

    def _records(self, found: _Pass, step: int, version: str) -> Iterator[tuple[Sample, TrainedTrajectory]]:
        logprobs = _numbers(found.logprobs)
        entropy = [] if found.entropy is None else _numbers(found.entropy)
        factors = _numbers(found.factors)
        distances = found.distances.double().cpu()
        start = 0
        for sample in found.samples:
            trajectory = sample.trajectory
            positions = [at for at, is_trained in enumerate(trajectory.trained_mask) if is_trained and at]
            rows = slice(start, start + len(positions))
            start = rows.stop
            mean, largest = _gap(distances[rows])
            yield (
                sample,
                TrainedTrajectory(
                    step=step,
                    sampled_step=step if sample.sampled_step is None else sample.sampled_step,
                    sampled_rank=None if sample.sampled_step is None else 0,
                    group=trajectory.task.group,
                    member=trajectory.member,
                    session=trajectory.session,
                    branch=trajectory.branch,
                    attempt=trajectory.attempt,
                    advantage=sample.advantage,
                    age=age_of(trajectory, version, self.ancestors),
                    positions=positions,
                    logprobs=logprobs[rows],
                    entropy=entropy[rows],
                    loss_weights=factors[rows] if any(factor != 1 for factor in factors[rows]) else [],
                    gap_mean=mean,
                    gap_max=largest,
                ),
            )


def age_of(trajectory: Trajectory, version: str, ancestors: Ancestors | None = None) -> int | None:
    """Return the number of the label `version` minus that of the oldest sampled token's version.

    `ancestors` place the versions of earlier starts of the run. Return None if no token was sampled, or if a version is
    a free label or not of this run.
    """
    trained = WeightVersion.parse(version)
    sampled = [label for label in dict.fromkeys(trajectory.weight_versions) if label]
    if trained is None:
        return None
    numbers = [(ancestors or Ancestors()).number_of(label, trained.incarnation) for label in sampled]
    known = [number for number in numbers if number is not None]
    return trained.number - min(known) if known and len(known) == len(sampled) else None


def _gap(distances: Tensor) -> tuple[float | None, float | None]:
    """Return (mean, largest) of the distances of one trajectory's tokens, None if there is none or one is not finite.

    They are not rounded: in float32, a gap is smaller than the last decimal of a log-probability.
    """
    if not len(distances) or not distances.isfinite().all():
        return None, None
    return float(distances.mean()), float(distances.max())


def _numbers(values: Tensor) -> list[float | None]:
    """Return rounded numbers, with None for those that are not finite."""
    rounded = values.double().cpu().round(decimals=_DECIMALS)
    if rounded.isfinite().all():
        return list(rounded.tolist())
    return [value if math.isfinite(value) else None for value in rounded.tolist()]
