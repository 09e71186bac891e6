"""`ControlQueue`: pause, flush, weight updates and memory requests, each at its moment between two steps.

Owned by the `Scheduler`, which calls `run_ready` between steps. Implements the table in
docs/scheduler-states.md: what each request does while serving, draining, paused or refusing. Nothing here
blocks: a request that has to wait (for started requests to finish, for the scheduler to become idle) is looked
at again after the next step, until its deadline.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_server.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    ReleaseMemoryOccupationReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightReq,
)
from verl_server.runtime.scheduler_stats import internal_state

if TYPE_CHECKING:
    from verl_server.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

_UPDATES = (UpdateWeightsFromTensorReq, UpdateWeightsFromDiskReq)


@dataclass(slots=True)
class _Pending:
    req: WeightReq
    deadline: float


@dataclass(slots=True)
class _PendingFlush:
    req: FlushCacheReq
    deadline: float


class ControlQueue:
    """Control requests in order of arrival, and the paused state."""

    def __init__(self, scheduler: Scheduler, timeout: float) -> None:
        self._scheduler = scheduler
        self._timeout = timeout
        self._queue: deque[_Pending] = deque()
        self._flushes: list[_PendingFlush] = []
        self._step_taken = True  # since the last update: generation gets one before the next
        self.paused = False
        self.draining = False
        """The head of the queue waits for started requests; nobody new is started."""

    def receive(self, req: ControlReq) -> None:
        """Act at once on what does not depend on the order of weight updates; queue the rest."""
        now = self._scheduler.clock()
        match req:
            case GetInternalStateReq():
                self._reply(ControlReply(id=req.id, success=True, payload=internal_state(self._scheduler)))
            case PauseGenerationReq():
                self._pause(req)
            case ContinueGenerationReq():
                self.paused = False
                self._reply(ControlReply(id=req.id, success=True))
            case FlushCacheReq():
                self._flushes.append(_PendingFlush(req, now + min(max(req.timeout, 0.0), self._timeout)))
            case UpdateWeightsFromTensorReq() | UpdateWeightsFromDiskReq() if (
                refused := self._scheduler.worker.weights.precheck(req)
            ):
                self._reply(refused)  # before any request waits, or is aborted, for it
            case _:
                self._queue.append(_Pending(req, now + self._timeout))

    def run_ready(self) -> None:
        """Carry out every queued request whose moment has come. Called between steps."""
        while self._queue:
            head = self._queue[0]
            if self._scheduler.clock() >= head.deadline:
                self._queue.popleft()
                self._refuse_late(head.req)
                continue
            if not self._is_ready(head.req):
                break
            self._queue.popleft()
            self._run(head.req)
        self.draining = bool(self._queue) and not self._owes_progress()
        self._run_flushes()

    def step_taken(self) -> None:
        self._step_taken = True

    def _owes_progress(self) -> bool:
        """Whether generation has not come any further since the last update: a flood of them would starve it."""
        return not self._step_taken or self._scheduler.planner.is_restarting()

    def is_ready(self) -> bool:
        """With nothing runnable: whether `run_ready` has something to do. Then nobody is waited for but, by a
        flush, requests that a pause froze."""
        return bool(self._queue) or (bool(self._flushes) and not self._is_busy())

    def wait_seconds(self) -> float | None:
        """How long the idle loop may sleep: until the next deadline, None without one."""
        deadlines = [item.deadline for item in self._queue] + [item.deadline for item in self._flushes]
        return max(0.0, min(deadlines) - self._scheduler.clock()) if deadlines else None

    # -- when ------------------------------------------------------------------------------------------------

    def _is_ready(self, req: WeightReq) -> bool:
        """Whether `req` may run now. Clears the way as its mode says."""
        scheduler = self._scheduler
        if isinstance(req, UpdateWeightVersionReq) and req.abort_all_requests:
            scheduler.abort_all("Aborted by a change of the weight version.")
        if not isinstance(req, _UPDATES):
            return True
        if scheduler.has_runnable() and self._owes_progress():
            return False
        if req.abort_all_requests or (req.mode == "abort" and not self.paused):
            scheduler.abort_all("Aborted by a weight update.")
        elif self.paused:
            return True  # whoever paused has decided what becomes of running requests
        elif req.mode == "retract":
            scheduler.planner.retract_all()
        elif req.mode == "wait":
            return not scheduler.planner.has_started()
        return True

    def _refuse_late(self, req: WeightReq) -> None:
        started = len(self._scheduler.requests)
        message = (
            f"{type(req).__name__} was not carried out: it waited {self._timeout:g} s (control_timeout) for its turn "
            f"while {started} requests were alive. The weights are unchanged. Pause or abort generation first, use "
            "mode='in_place', 'retract' or 'abort', or raise control_timeout."
        )
        logger.warning(message)
        self._reply(ControlReply(id=req.id, success=False, message=message, status_code=504))

    # -- what ------------------------------------------------------------------------------------------------

    def _run(self, req: WeightReq) -> None:
        scheduler = self._scheduler
        planner = scheduler.planner
        scheduler.emit()  # ends of aborted requests are sent before the reply, and under the old version
        if isinstance(req, ReleaseMemoryOccupationReq) and self._is_busy():
            message = (
                f"Memory cannot be released while {len(planner.running)} requests run and {len(planner.waiting)} "
                "wait. Wait for them, abort them, or pause generation with mode='abort' or 'retract' first."
            )
            self._reply(ControlReply(id=req.id, success=False, message=message, status_code=400))
            return
        reply = scheduler.worker.control(req)
        if isinstance(req, _UPDATES):
            self._step_taken = False
        # A refused update that left the weights whole keeps the cache. A torn one, released memory and new
        # weights do not.
        changed = reply.success and isinstance(req, (*_UPDATES, ReleaseMemoryOccupationReq))
        if changed or scheduler.worker.weights.refusal() is not None:
            planner.start_version()
        self._reply(reply)

    def _pause(self, req: PauseGenerationReq) -> None:
        self.paused = True
        if req.mode == "abort":
            self._scheduler.abort_all("Aborted")
        elif req.mode == "retract":
            self._scheduler.planner.retract_all()
        self._reply(ControlReply(id=req.id, success=True))

    def _is_busy(self) -> bool:
        """Whether any request runs or waits; while paused, waiting ones do not count."""
        planner = self._scheduler.planner
        return bool(planner.running) or (bool(planner.waiting) and not self.paused)

    def _run_flushes(self) -> None:
        if not self._flushes:
            return
        busy = self._is_busy()
        planner = self._scheduler.planner
        waiting = []
        for item in self._flushes:
            if not busy:
                planner.cache.start_version()
                self._reply(ControlReply(id=item.req.id, success=True, message="Cache flushed."))
            elif self._scheduler.clock() >= item.deadline:
                message = (
                    f"The cache was not flushed: {len(planner.running)} requests run and {len(planner.waiting)} wait. "
                    "Finish, abort or retract them first, or give a longer timeout."
                )
                self._reply(ControlReply(id=item.req.id, success=False, message=message, status_code=400))
            else:
                waiting.append(item)
        self._flushes = waiting

    def _reply(self, reply: ControlReply) -> None:
        self._scheduler.emit()
        self._scheduler.send(reply)
