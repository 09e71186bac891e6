"""`StepBatch`: the groups that a step of an asynchronous run trains, and the part of each rank.

Rank 0 of `async_grpo` makes it when enough groups have finished, and sends the other ranks their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from verl_server.files.json_values import jsonable
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.ages import Ages
from verl_server.train.batches import Sample
from verl_server.train.rollout_report import RolloutReport
from verl_server.train.rollouts.group_buffer import Group


class _Share(msgspec.Struct, kw_only=True):
    """The part of a step that rank 0 sends to another rank."""

    report: RolloutReport
    samples: list[tuple[Trajectory, float, int | None]]
    """(trajectory, advantage, step in which it began) of each sample of the rank."""


@dataclass
class StepBatch:
    """The groups of a step. Ranks other than 0 know `report` and `samples` only."""

    report: RolloutReport
    """About the episodes of all ranks."""
    samples: list[Sample]
    """The samples that this rank trains."""
    groups: list[Group[Rollout]] = field(default_factory=list)
    """Those that the step trains, and those that they replace (`Group.is_left_out`)."""
    ages: Ages = field(default_factory=Ages)
    waits: dict[str, float] = field(default_factory=dict)
    """Cause -> seconds that the trainer waited for it."""
    idle: dict[str, float] = field(default_factory=dict)
    """trainer, servers -> share of the time since the last batch without work."""
    cache_hit_rate: float | None = None
    dropped: int = 0
    """Groups that became too old since the last step."""

    @classmethod
    def decode(cls, share: bytes) -> StepBatch:
        """Return a rank's part from the result of `encode_share`."""
        decoded = msgspec.msgpack.decode(share, type=_Share)
        return cls(decoded.report, [Sample(t, a, sampled_step=s) for t, a, s in decoded.samples])

    @property
    def rollout(self) -> Rollout:
        """The episodes of all groups."""
        results = [group.result for group in self.groups if group.result is not None]
        return Rollout(
            trajectories=[t for result in results for t in result.trajectories],
            replaced=[t for result in results for t in result.replaced],
            seconds=self.report.seconds,
        )


def divide(samples: Sequence[Sample], ranks: int) -> list[list[Sample]]:
    """Return the samples of each rank: about equally many tokens, each in the order of `samples`."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(samples)), key=lambda place: -len(samples[place].trajectory.tokens)):
        rank = tokens.index(min(tokens))
        tokens[rank] += len(samples[place].trajectory.tokens)
        shares[rank].append(place)
    return [[samples[place] for place in sorted(share)] for share in shares]


def encode_share(report: RolloutReport, samples: Sequence[Sample]) -> bytes:
    """Return the part of a rank in bytes, for `StepBatch.decode`. The report is about all ranks."""
    rows = [(sample.trajectory, sample.advantage, sample.sampled_step) for sample in samples]
    return msgspec.msgpack.encode(_Share(report=report, samples=rows), enc_hook=jsonable)
