"""A scheduler process that tests can hold: `verl_server.scheduler.process` with the points of `pauses`.

`server` starts it in place of the real one.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.pauses import hold
from verl_server.ipc.child_process import child_main
from verl_server.messages.weight_requests import RegisterWeightsReq, UpdateReq
from verl_server.scheduler import process as scheduler_process
from verl_server.weight_sync.copying.fused_copy import CopyPlan
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater


def make_holdable(tp_rank: int) -> None:
    prepare, handle, run = WeightSources.prepare, WeightUpdater.handle, CopyPlan.run

    def held_prepare(self: WeightSources, req: Any) -> Any:
        if isinstance(req, UpdateReq | RegisterWeightsReq):
            hold("staging", tp_rank)
        return prepare(self, req)

    def held_handle(self: WeightUpdater, req: Any, prepared: Any = None) -> Any:
        if isinstance(req, UpdateReq):
            hold("turn", tp_rank)
        return handle(self, req, prepared)

    def held_run(self: CopyPlan) -> None:
        half = self._pairs[: len(self._pairs) // 2]
        with torch.inference_mode():
            torch._foreach_copy_([destination for destination, _ in half], [source for _, source in half])
        hold("copying", tp_rank)
        run(self)

    WeightSources.prepare = held_prepare  # type: ignore[method-assign]
    WeightUpdater.handle = held_handle  # type: ignore[method-assign]
    CopyPlan.run = held_run  # type: ignore[method-assign]


def run_holdable(argument: dict[str, Any], ready: Any) -> None:
    make_holdable(argument["tp_rank"])
    scheduler_process.run_scheduler(argument, ready)


if __name__ == "__main__":
    child_main(run_holdable)
