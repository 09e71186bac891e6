"""`ControlQueue`: runs pause, flush, transactions, weight updates and memory requests between two steps.

Owned by the `Scheduler`, which calls `run_ready` between steps. It implements the tables in docs/scheduler-states.md:
which requests are refused on arrival, which are staged first, in which order they run, and the effect of each request
while generation is serving, draining, paused, held by a transaction or refusing. No method blocks. A request may have
to wait for its staging, for started requests to finish, or for the scheduler to become idle. The queue checks such a
request again after each step, and when the stager wakes the loop, until the deadline of the request.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from verl_server.errors import VerlServerError
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    QueuedReq,
)
from verl_server.messages.weight_requests import (
    ENDING_REQS,
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    StagedReq,
    UnregisterWeightsReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightReq,
)
from verl_server.scheduler.control.engine_loop import EngineLoop
from verl_server.scheduler.control.pauses import Pauses
from verl_server.scheduler.control.transaction_fence import TransactionFence
from verl_server.scheduler.control.update_times import UpdateTimes
from verl_server.scheduler.control.version_border import VersionBorder
from verl_server.worker.weights.weight_sources import needs_staging

logger = logging.getLogger(__name__)

_GIVEN_UP = 499
"""Status code of a request whose caller no longer waits for it."""


@dataclass(slots=True, eq=False)
class _Pending:
    req: WeightReq
    arrived: float
    deadline: float
    staged: bool = False
    """True after the request was submitted to the stager."""
    ready: bool = True
    """False only while the request is being staged."""
    prepare_seconds: float = 0.0
    """Seconds from the arrival until the request was staged."""


@dataclass(slots=True)
class _PendingFlush:
    req: FlushCacheReq
    deadline: float


class ControlQueue:
    """Control requests in order of arrival, the paused state, and the transaction that holds generation."""

    def __init__(self, scheduler: EngineLoop, timeout: float, default_lease: float) -> None:
        self._scheduler = scheduler
        self._timeout = timeout
        self._queue: deque[_Pending] = deque()
        self._aside: dict[int, _Pending] = {}
        """Requests by id that run as soon as they are staged, independent of the order of the queue."""
        self._overdue: dict[int, StagedReq] = {}
        """Requests by id that were refused with 504 before their staging ended."""
        self._flushes: list[_PendingFlush] = []
        self._step_taken = True
        """True if a step ran since the last update. If no step ran, the next update waits for a step."""
        self.transaction = TransactionFence(scheduler.clock, default_lease)
        self.pauses = Pauses(scheduler, timeout, self._reply)
        self.border = VersionBorder(scheduler)
        self._times = UpdateTimes(scheduler.clock)
        self.draining = False
        """True while a pause, or the first request of the queue, waits for started requests to end. No other request is
        started."""

    @property
    def paused(self) -> bool:
        """True from a pause until `ContinueGenerationReq`."""
        return self.pauses.paused

    @property
    def holds_generation(self) -> bool:
        """True while no step runs and requests only queue: during a pause, and during an open transaction."""
        return self.paused or self.transaction.is_open

    def receive(self, req: QueuedReq) -> None:
        """Carry out `req` now if it does not depend on the order of weight updates. Otherwise stage and queue it."""
        now = self._scheduler.clock()
        match req:
            case GetInternalStateReq():
                self._reply(ControlReply(id=req.id, success=True, payload=self._scheduler.internal_state()))
            case PauseGenerationReq():
                self.pauses.receive(req)
            case ContinueGenerationReq():
                self.pauses.end()
                self._reply(ControlReply(id=req.id, success=True))
            case FlushCacheReq():
                self._flushes.append(_PendingFlush(req, now + min(max(req.timeout, 0.0), self._timeout)))
            case _:
                self._receive_ordered(req, _Pending(req, now, now + self._timeout))

    def withdraw(self, request_id: int) -> None:
        """Remove a request whose caller gave up, unless the request has begun.

        The caller may then write its memory again.
        """
        message = "The request was withdrawn: its caller gave up before it began."
        for item in [item for item in self._flushes if item.req.id == request_id]:
            self._flushes.remove(item)
            self._reply(ControlReply(id=request_id, success=False, message=message, status_code=_GIVEN_UP))
        self.pauses.withdraw(request_id, message, _GIVEN_UP)
        pending = self._aside.get(request_id) or self._queued(request_id)
        if pending is not None and not isinstance(pending.req, ENDING_REQS):
            self._withdraw(pending, message, _GIVEN_UP)

    def run_ready(self) -> None:
        """Carry out the queued requests that may run now. Called between steps.

        At most one of them copies weights. Before the next copy the loop must read its messages, because the caller of
        that copy may have given up.
        """
        self._take_staged()
        self._watch_aside()
        self.pauses.watch()
        while self._queue:
            head = self._queue[0]
            if self._scheduler.clock() >= head.deadline:
                self._queue.popleft()
                self._refuse_late(head)
                continue
            if not head.ready or not self._is_ready(head.req):
                break
            self._queue.popleft()
            self._run(head)
            if isinstance(head.req, UpdateReq):
                break
        drains = bool(self._queue) and self._queue[0].ready and not self._owes_progress()
        self.draining = drains or self.pauses.are_waiting
        self._watch_lease()
        self._run_flushes()

    def step_taken(self) -> None:
        """Record that a step was planned since the last update."""
        self._step_taken = True

    def _owes_progress(self) -> bool:
        """Return True if generation made no progress since the last update: a series of updates must not stop it.

        There is no progress if no step ran, or while a request still recomputes the KV that the update dropped.
        """
        return not self._step_taken or self._scheduler.planner.is_restarting()

    def is_ready(self) -> bool:
        """Return True if `run_ready` has something to do. Only a loop without a request to compute calls this method.

        Two kinds of requests do not count: a request that is being staged, because the stager wakes the loop, and a
        flush that waits for requests which a pause froze.
        """
        return (
            (bool(self._queue) and self._queue[0].ready)
            or (bool(self._flushes) and not self._is_busy())
            or self.pauses.is_ready()
        )

    def wait_seconds(self) -> float | None:
        """Return the seconds until the next deadline, which an idle loop may sleep. None if there is no deadline."""
        deadlines = [item.deadline for item in (*self._queue, *self._aside.values())]
        deadlines += [item.deadline for item in self._flushes] + self.pauses.deadlines()
        if self.transaction.is_open and not self._transaction_call_pending():
            deadlines.append(self.transaction.lease_end)
        return max(0.0, min(deadlines) - self._scheduler.clock()) if deadlines else None

    # -- arrival and staging ---------------------------------------------------------------------------------

    def _receive_ordered(self, req: WeightReq, pending: _Pending) -> None:
        """Check `req` and answer a refusal at once. Otherwise queue it, and begin to stage it if it needs staging."""
        try:
            self._scheduler.worker.weights.check(req)
            if not any(isinstance(item.req, (BeginWeightUpdateReq, EndWeightUpdateReq)) for item in self._queue):
                self.transaction.check(req)  # no queued request will change which calls are admitted
        except VerlServerError as error:
            self._abandon(req)
            self._refuse(req, str(error), error.status_code)
            return
        if self.transaction.owns(req):
            self.transaction.renew()
        if isinstance(req, StagedReq) and needs_staging(req):
            if stuck := [other for other in self._overdue.values() if _is_join(other) == _is_join(req)]:
                self._abandon(req)
                self._refuse(req, self._stuck_message(stuck), 503)
                return
            pending.staged, pending.ready = True, False
            self._scheduler.worker.stage(req)
        if isinstance(req, (RegisterWeightsReq, InitWeightsUpdateGroupReq)):
            self._aside[req.id] = pending
        else:
            self._queue.append(pending)

    def _abandon(self, req: WeightReq) -> None:
        """Stage a refused request on all ranks, and drop it, because its sender expects every rank to take part."""
        if isinstance(req, UpdateWeightsFromTensorReq) and not (req.serialized_named_tensors or req.ipc_handles):
            return
        if isinstance(req, (UpdateWeightsFromDistributedReq, UpdateWeightsFromTensorReq)):
            self._scheduler.worker.stage(req)
            self._scheduler.worker.drop_staged(req)

    def _take_staged(self) -> None:
        """Process the stager's results: answer refusals, run requests outside the queue, mark queued requests."""
        for request_id, error in self._scheduler.worker.stager.finished():
            self._overdue.pop(request_id, None)
            pending = self._aside.pop(request_id, None) or self._queued(request_id)
            if pending is None:
                continue  # it was refused and dropped meanwhile
            pending.ready = True
            pending.prepare_seconds = self._scheduler.clock() - pending.arrived
            if error is not None:
                if pending in self._queue:
                    self._queue.remove(pending)
                self._refuse(pending.req, str(error), error.status_code)
            elif pending not in self._queue:
                self._run(pending)

    def _queued(self, request_id: int) -> _Pending | None:
        return next((item for item in self._queue if item.req.id == request_id), None)

    def _watch_aside(self) -> None:
        now = self._scheduler.clock()
        for pending in [item for item in self._aside.values() if now >= item.deadline]:
            del self._aside[pending.req.id]
            self._refuse_late(pending)

    def _drop(self, pending: _Pending) -> None:
        if pending.staged and isinstance(pending.req, StagedReq):
            self._scheduler.worker.drop_staged(pending.req)

    def _drop_all_updates(self) -> None:
        """Refuse the staged updates and close everything that they opened, because the weights were released."""
        for pending in self._staged():
            if not _is_join(pending.req):
                name = type(pending.req).__name__
                self._withdraw(
                    pending, f"{name}: the weights were released meanwhile. Resume them and send it again.", 400
                )

    def _drop_described(self, unregistered: UnregisterWeightsReq) -> None:
        """Refuse staged requests whose descriptions were unregistered since, and close everything that they opened."""
        ids = unregistered.registrations
        for pending in self._staged():
            description = getattr(pending.req, "description", None)
            if description is not None and (ids is None or description.id in ids):
                self._withdraw(pending, f"The registration '{description.id}' was unregistered meanwhile.", 400)

    def _staged(self) -> list[_Pending]:
        return [item for item in (*self._queue, *self._aside.values()) if item.staged]

    def _withdraw(self, pending: _Pending, message: str, status_code: int) -> None:
        if pending in self._queue:
            self._queue.remove(pending)
        self._aside.pop(pending.req.id, None)
        self._drop(pending)
        self._refuse(pending.req, message, status_code)

    def _stuck_message(self, stuck: list[StagedReq]) -> str:
        kinds = ", ".join(type(req).__name__ for req in stuck)
        return (
            f"Staging is stuck in {kinds}, which was refused because it took longer than {self._timeout:g} s "
            "(control_timeout). The old weights are served, and pushes by registration work. Check that the trainer is "
            "alive and the disk readable. If staging does not continue, restart the server."
        )

    # -- turns -----------------------------------------------------------------------------------------------

    def _is_ready(self, req: WeightReq) -> bool:
        """Return True if `req` may run now. Abort or retract running requests if its mode requires that."""
        scheduler = self._scheduler
        if isinstance(req, UpdateWeightVersionReq) and req.abort_all_requests and not self.transaction.is_open:
            scheduler.abort_all("Aborted by a change of the weight version.")
        if not isinstance(req, (UpdateReq, BeginWeightUpdateReq)) or self._is_fenced(req):
            return True
        if scheduler.has_runnable() and self._owes_progress():
            return False
        aborts = isinstance(req, UpdateReq) and req.abort_all_requests
        if aborts or (req.mode == "abort" and not self.holds_generation):
            scheduler.abort_all("Aborted by a weight update.")
        elif self.holds_generation:
            return True  # the pause, or the transaction, has already decided what happens to running requests
        elif req.mode == "retract":
            scheduler.settle()
            scheduler.planner.retract_all()
        elif req.mode == "wait":
            return not scheduler.planner.has_started()
        return True

    def _is_fenced(self, req: WeightReq) -> bool:
        try:
            self.transaction.check(req)
        except VerlServerError:
            return True
        return False

    def _transaction_call_pending(self) -> bool:
        """Return True if a call of the open transaction is queued. While it is queued, the lease does not expire."""
        return any(self.transaction.owns(item.req) for item in self._queue)

    def _watch_lease(self) -> None:
        transaction = self.transaction
        if (
            not transaction.is_open
            or self._transaction_call_pending()
            or self._scheduler.clock() < transaction.lease_end
        ):
            return
        logger.warning(
            "The weight-update transaction %s is discarded: it received no call for %g s.",
            transaction.name,
            transaction.lease_seconds,
        )
        self._carry_out(_Pending(EndWeightUpdateReq(transaction_id=transaction.transaction_id, discard=True), 0.0, 0.0))

    # -- carrying out ----------------------------------------------------------------------------------------

    def _run(self, pending: _Pending) -> None:
        req = pending.req
        self._scheduler.settle()  # send the tokens of the last step before the reply, under the old version
        try:
            self.transaction.check(req)
        except VerlServerError as error:
            self._drop(pending)
            self._refuse(req, str(error), error.status_code)
            return
        if isinstance(req, ReleaseMemoryOccupationReq) and self._is_busy():
            planner = self._scheduler.planner
            message = (
                f"Memory cannot be released while {len(planner.running)} requests run and {len(planner.waiting)} "
                "wait. Wait for them, abort them, or pause generation with mode='abort' or 'retract' first."
            )
            self._refuse(req, message, 400)
            return
        was_asleep = self._scheduler.worker.weights.state == "asleep"
        reply = self._carry_out(pending)
        if self._scheduler.worker.weights.state == "asleep" and not was_asleep:
            self._drop_all_updates()
        elif isinstance(req, UnregisterWeightsReq):
            self._drop_described(req)
        self._reply(reply)

    def _carry_out(self, pending: _Pending) -> ControlReply:
        """Run the request on all ranks, and start a new version of the prefix cache if the weights changed."""
        scheduler, req = self._scheduler, pending.req
        worker, planner = scheduler.worker, scheduler.planner
        epoch = worker.weights.epoch
        if isinstance(req, (UpdateReq, BeginWeightUpdateReq)) and not self.transaction.is_open:
            self._times.hold(self.paused)
        reply = worker.run_staged(req) if pending.staged and isinstance(req, StagedReq) else worker.control(req)
        if isinstance(req, (UpdateReq, BeginWeightUpdateReq)):
            self._step_taken = False
        self._note_transaction(req, reply)
        if isinstance(req, UpdateWeightsFromDiskReq) and req.keep_pause and reply.success:
            self.pauses.paused = True
        self.border.cross()
        if worker.weights.epoch != epoch:
            planner.start_version()
        if isinstance(req, (UpdateReq, EndWeightUpdateReq)) and reply.success:
            self._times.add(reply, req, pending.prepare_seconds, ends=not self.transaction.is_open)
        return reply

    def _note_transaction(self, req: WeightReq, reply: ControlReply) -> None:
        if isinstance(req, BeginWeightUpdateReq) and reply.success:
            self.transaction.open(req)
        elif isinstance(req, EndWeightUpdateReq) and reply.success:
            self.transaction.close()
        elif self.transaction.owns(req):
            self.transaction.renew()
        if self.transaction.is_open and (isinstance(req, BeginWeightUpdateReq) or self.transaction.owns(req)):
            payload = reply.payload if isinstance(reply.payload, dict) else {}
            reply.payload = payload | {"lease_seconds": self.transaction.lease_seconds}

    def _refuse(self, req: WeightReq, message: str, status_code: int) -> None:
        """Refuse `req`. Close the registrations in its `forget` nevertheless, because their owner frees the memory."""
        if self.transaction.owns(req):
            self.transaction.renew()
        if isinstance(req, (UpdateWeightsFromTensorReq, RegisterWeightsReq)) and req.forget:
            self._scheduler.worker.control(UnregisterWeightsReq(registrations=req.forget))
        self._reply(ControlReply(id=req.id, success=False, message=message, status_code=status_code))

    def _refuse_late(self, pending: _Pending) -> None:
        req, started = pending.req, len(self._scheduler.requests)
        waited = "its turn" if pending.ready else "its staging"
        message = (
            f"{type(req).__name__} was not carried out: it waited {self._timeout:g} s (control_timeout) for {waited} "
            f"while {started} requests were alive. The weights are unchanged. "
        )
        if pending.ready:
            message += (
                "Pause or abort generation first, use mode='in_place', 'retract' or 'abort', or raise control_timeout."
            )
        else:
            message += "Check that the trainer is alive and the disk readable, or raise control_timeout."
        logger.warning(message)
        self._drop(pending)
        if not pending.ready and isinstance(req, StagedReq):
            self._overdue[req.id] = req
        self._refuse(req, message, 504)

    def _is_busy(self) -> bool:
        """Return True if a request runs, or if a request waits and generation is not held."""
        planner = self._scheduler.planner
        return bool(planner.running) or (bool(planner.waiting) and not self.holds_generation)

    def _run_flushes(self) -> None:
        if not self._flushes:
            return
        busy = self._is_busy()
        planner = self._scheduler.planner
        waiting = []
        for item in self._flushes:
            if not busy:
                planner.flush_cache()
                self._reply(ControlReply(id=item.req.id, success=True, message="Cache flushed."))
            elif self._scheduler.clock() >= item.deadline:
                message = (
                    f"The cache was not flushed: {len(planner.running)} requests run and {len(planner.waiting)} wait. "
                    "Finish, abort or retract them first, or pass a longer timeout."
                )
                self._reply(ControlReply(id=item.req.id, success=False, message=message, status_code=400))
            else:
                waiting.append(item)
        self._flushes = waiting

    def _reply(self, reply: ControlReply) -> None:
        self._scheduler.emit()
        reply.weights_refusal = None if self.transaction.is_open else self._scheduler.worker.weights.refusal()
        self._scheduler.send(reply)


def _is_join(req: ControlReq) -> bool:
    """Return True if `req` joins a process group. The stager joins a group on a separate thread."""
    return isinstance(req, InitWeightsUpdateGroupReq)
