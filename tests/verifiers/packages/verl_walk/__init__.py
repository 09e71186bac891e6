"""Several turns: the policy walks with a tool, whose state is the rollout's. One server of tools for all rollouts."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from verl_walk.tools import WalkState, WalkTools

__all__ = ["WalkTaskset"]


class WalkData(vf.TaskData):
    target: int


class WalkTask(vf.Task[WalkData, WalkState]):
    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        return 1.0 / (1.0 + abs(trace.state.position - self.data.target))

    @vf.metric
    async def steps(self, trace: vf.Trace) -> float:
        return float(trace.state.steps)


class WalkTaskset(vf.Taskset[WalkTask]):
    def load(self) -> Iterator[WalkTask]:
        for target in (2, -2):
            yield WalkTask(WalkData(prompt=f"Go from 0 to {target}.", target=target), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [WalkTools(vf.SharedToolsetConfig())]
