"""`compare_pace`: the same episodes at their own pace and in lock step, beside the ideal schedule.

The demo calls it. All times are measured with the loop's own engine and environments. The tasks have sampling seeds, so
that both runs sample the same tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.engine.base import EngineBase
from verl_server.rollout.agent_loop import AgentLoop, Rollout
from verl_server.rollout.trajectory import Task, Trajectory


@dataclass(frozen=True)
class PaceComparison:
    """The two runs. Times are wall times in seconds."""

    own_pace: list[Trajectory]
    lockstep: list[Trajectory]
    own_pace_seconds: float
    lockstep_seconds: float
    longest_alone_seconds: float
    """Time of the episode with the longest waits, played alone."""
    work_seconds: float
    """Time of all generations of the run without any environment."""
    same_trajectories: int
    """Number of episodes that sampled the same tokens in both runs."""

    @property
    def ideal_seconds(self) -> float:
        """A lower bound for every schedule: the longest episode alone, or all generations, whichever takes longer."""
        return max(self.longest_alone_seconds, self.work_seconds)

    @property
    def ratio(self) -> float:
        """Speedup of the run at its own pace over the run in lock step."""
        return self.lockstep_seconds / self.own_pace_seconds

    @property
    def ideal_ratio(self) -> float:
        """`ratio` of an ideal schedule."""
        return self.lockstep_seconds / self.ideal_seconds


def compare_pace(loop: AgentLoop, tasks: Sequence[Task], rounds: int = 3) -> PaceComparison:
    """Play `tasks` both ways by turns, `rounds` times each, with an empty prefix cache, and return the median runs."""
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
    """Generate every turn again, without environments, and return the seconds. Turns of an episode stay in order."""

    async def turns(trajectory: Trajectory) -> None:
        session_id = secrets.token_hex(16)  # as in an episode, so that the cache works as well
        for turn in trajectory.turns:
            start, end = turn.action_span
            await engine.async_generate(
                input_ids=trajectory.tokens[:start],
                sampling_params={"max_new_tokens": end - start, "ignore_eos": True},
                return_logprob=True,
                session_id=session_id,
            )

    start = time.monotonic()
    await asyncio.gather(*(turns(trajectory) for trajectory in trajectories))
    return time.monotonic() - start
