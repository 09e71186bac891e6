"""How much waiting for each other costs: the same episodes at their own pace, in lock step, and ideally.

Called by the demo. Everything here is measured on the engine and the environments that the loop has; the
sampling seeds of the tasks make both runs sample the same tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.engine.base import EngineBase
from verl_server.rollout.agent_loop import AgentLoop, Rollout
from verl_server.rollout.trajectory import Task, Trajectory


@dataclass(frozen=True)
class PaceComparison:
    """Wall times in seconds."""

    own_pace: list[Trajectory]
    lockstep: list[Trajectory]
    own_pace_seconds: float
    lockstep_seconds: float
    longest_alone_seconds: float
    """The episode that waits longest, played with nothing beside it."""
    work_seconds: float
    """All generations of the run at the rate at which the server answers them when nobody waits."""
    same_trajectories: int
    """Episodes that sampled the same tokens in both runs."""

    @property
    def ideal_seconds(self) -> float:
        """No schedule can be faster than its longest episode, nor than its work."""
        return max(self.longest_alone_seconds, self.work_seconds)

    @property
    def ratio(self) -> float:
        return self.lockstep_seconds / self.own_pace_seconds

    @property
    def ideal_ratio(self) -> float:
        return self.lockstep_seconds / self.ideal_seconds


def compare_pace(loop: AgentLoop, tasks: Sequence[Task], rounds: int = 3) -> PaceComparison:
    """Play `tasks` both ways, alternating, `rounds` times each with an empty prefix cache; the median runs count."""
    own_runs, lockstep_runs = [], []
    for _ in range(rounds):
        loop.engine.flush_cache(timeout=10)
        lockstep_runs.append(loop.run_lockstep(tasks))
        loop.engine.flush_cache(timeout=10)
        own_runs.append(loop.run(tasks))
    own, lockstep = _median(own_runs), _median(lockstep_runs)
    longest = max(own.trajectories, key=lambda t: t.seconds("env"))
    alone = loop.run([longest.task])
    loop.engine.flush_cache(timeout=10)
    return PaceComparison(
        own_pace=own.trajectories,
        lockstep=lockstep.trajectories,
        own_pace_seconds=own.seconds,
        lockstep_seconds=lockstep.seconds,
        longest_alone_seconds=alone.seconds,
        work_seconds=loop.run_async(_replay(loop.engine, own.trajectories)),
        same_trajectories=sum(
            a.tokens == b.tokens for a, b in zip(own.trajectories, lockstep.trajectories, strict=True)
        ),
    )


def _median(rollouts: Sequence[Rollout]) -> Rollout:
    return sorted(rollouts, key=lambda rollout: rollout.seconds)[len(rollouts) // 2]


async def _replay(engine: EngineBase, trajectories: Sequence[Trajectory]) -> float:
    """Seconds to generate every turn again, each episode's turns in order and without an environment."""

    async def turns(trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            start, end = turn.action_span
            await engine.async_generate(
                input_ids=trajectory.tokens[:start],
                sampling_params={"max_new_tokens": end - start, "ignore_eos": True},
                return_logprob=True,
            )

    start = time.monotonic()
    await asyncio.gather(*(turns(trajectory) for trajectory in trajectories))
    return time.monotonic() - start
