"""`StepPipeline`: launches steps and collects their results. It owns the steps between these moments.

The `Scheduler` owns it and calls `advance` for each turn with something to run. There are at most two such steps: the
step in flight, which was launched and not collected, and the next one, if it is planned ahead.

If the runner overlaps steps, a turn plans and launches step n+1, and then collects step n, which the device has
computed meanwhile. So step n+1 is planned before the tokens of step n are known on the host (see `Req`). If the runner
does not overlap steps, every step is collected in the turn that launched it.

If grammars constrain step n+1, step n is collected between the forward pass and the sampling of step n+1, because the
masks follow from its tokens. While the masks are computed, the tokens are sent and step n+2 is planned ahead. So
little is left to do after the masks, when the device waits for the sampling of step n+1 and the forward pass of step
n+2. The next turn launches step n+2 as it was planned, unless a request ended or may be admitted meanwhile: then the
turn plans step n+2 again. So the steps are those of an engine that never plans ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from verl_server.messages.io_struct import FinishReason
from verl_server.sampling.spec import ForwardOutput, TokenMasks
from verl_server.scheduler.batch_planner import BatchPlanner
from verl_server.scheduler.grammars import Grammars
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch
from verl_server.worker.device import is_out_of_memory
from verl_server.worker.tp_worker import Step, TpWorker

logger = logging.getLogger(__name__)

MEMORY_REMEDY = (
    "Request fewer log-probabilities (top_logprobs_num, token_ids_logprob), or leave more memory to steps: start the "
    "server with a smaller mem_fraction_static, chunked_prefill_size or max_running_requests."
)


class StepOwner(Protocol):
    """The parts of the `Scheduler` that handle the results of steps."""

    def process(self, batch: ScheduleBatch, output: ForwardOutput, prefilled: list[Req]) -> None:
        """Append the new tokens to their requests, end the finished requests, and collect the entries to send."""

    def end(self, req: Req, reason: FinishReason) -> None:
        """End a request with the output that it has so far."""

    def abort(self, req: Req, message: str, status_code: int | None, *, cache: bool = True) -> None:
        """End a request with an abort. `cache=False` keeps its newest pages out of the prefix cache."""

    def emit(self) -> None:
        """Send the collected entries."""


class StepPipeline:
    def __init__(self, planner: BatchPlanner, worker: TpWorker, grammars: Grammars, owner: StepOwner) -> None:
        self._planner, self._worker, self._grammars, self._owner = planner, worker, grammars, owner
        self._in_flight: tuple[ScheduleBatch, Step] | None = None
        """The step that was launched and not yet collected. Between two turns it is None unless the runner overlaps."""
        self._planned: ScheduleBatch | None = None
        """The step after the one in flight, if it is planned ahead. The lengths of its requests have advanced."""

    @property
    def is_empty(self) -> bool:
        """True if no step is in flight. Then no step is planned ahead, either."""
        return self._in_flight is None

    def advance(self, *, only_started: bool) -> None:
        """Launch the next step, then collect the step before it.

        `only_started` admits no request that was not started before (a drain).
        """
        if self._in_flight is not None and self._in_flight[0].reads_outputs():
            self.collect()
        batch = self._next(only_started)
        if batch is None:
            self.collect()
            return
        try:
            make_masks = partial(self._masks, batch, only_started) if batch.has_grammars else None
            step = self._worker.launch(batch.forward, batch.specs, make_masks)
        except Exception as error:
            if not self._worker.is_recoverable(error):
                raise
            self.settle()  # the results of the step before are complete
            if is_out_of_memory(error):
                self._retry_smaller(batch, error)
            else:
                self._fail(batch, error)
            return
        self._read()
        self._in_flight = batch, step
        if not self._worker.runner.overlaps:
            self._read()

    def collect(self) -> None:
        """Wait for the step in flight, if any, and process its results. Afterwards no step is launched or planned."""
        self._drop_planned()
        self._read()

    def settle(self) -> None:
        """Do what `collect` does, and send the results. Afterwards the host knows every token."""
        self.collect()
        self._owner.emit()

    # -- planning ------------------------------------------------------------------------------------------------

    def _next(self, only_started: bool) -> ScheduleBatch | None:
        """Return the next step, which must be launched at once, or None if there is nothing to run now."""
        planned = self._planned
        if planned is not None and self._planner.confirm(planned, only_started):
            self._planned = None
            return planned
        self._drop_planned()
        return self._planner.plan(only_started, settled=self._in_flight is None)

    def _plan_ahead(self, launching: ScheduleBatch, only_started: bool) -> None:
        """Plan the step after `launching`, whose sampling is not launched yet, if that step is foreseeable."""
        assert self._planned is None and self._in_flight is None
        if self._worker.runner.overlaps and not launching.reads_outputs():
            self._planned = self._planner.plan_ahead(only_started)

    def _drop_planned(self) -> None:
        """Undo the step that is planned ahead, if any. Its requests keep their pages."""
        if self._planned is not None:
            self._planned.undo()
            self._planned = None

    # -- launching -----------------------------------------------------------------------------------------------

    def _masks(self, batch: ScheduleBatch, only_started: bool, is_due: Callable[[], bool] | None) -> TokenMasks | None:
        """Return the masks for the sampling of `batch`, whose forward pass was launched.

        `is_due` is as in `StepMasks.finish`. If the matcher of a request failed, the request ends with the
        reason. If the mask of a request is late, the request samples no token in this step.
        """
        masks = self._grammars.masks
        assert masks is not None
        masks.expect(batch.sampled)
        self._read()
        started = masks.start(batch.sampled)
        try:
            self._owner.emit()
            self._plan_ahead(batch, only_started)
        finally:  # the matchers are in use, so no request may end before
            step = masks.finish(started, is_due)
        batch.leave_out(step.late)
        if self._planned is not None and not self._planned.repeat(step.late):
            self._drop_planned()
        for req, reason in step.failures:
            self._owner.end(req, reason)
        return step.masks

    # -- results -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Wait for the result of the step in flight, if any, and process it."""
        if self._in_flight is None:
            return
        (batch, step), self._in_flight = self._in_flight, None
        try:
            output = step.result()
        except Exception as error:
            if not self._worker.is_recoverable(error):
                raise
            self._fail(batch, error)
            return
        prefilled = self._planner.collected(batch)
        self._owner.process(batch, output, prefilled)
        self._planner.share(prefilled)  # after `process`, which freed pages that hold NaN

    def _fail(self, batch: ScheduleBatch, error: Exception) -> None:
        """End the requests of a step that could not be computed.

        Drop their results of the step that was launched after it.
        """
        logger.error("A step of %d requests failed; they are aborted.", len(batch.reqs), exc_info=error)
        for req in batch.reqs:
            if req.row >= 0:
                self._owner.abort(req, f"The step failed: {type(error).__name__}: {error}", 500, cache=False)

    def _retry_smaller(self, batch: ScheduleBatch, error: Exception) -> None:
        """Plan smaller steps after `batch` ran out of memory at its launch. End a request that fails alone."""
        req = self._planner.out_of_memory(batch)
        if req is None:
            logger.warning(
                "A step of %d requests and %d tokens ran out of memory. The requests are computed in smaller steps. "
                "%s (%s)",
                len(batch.reqs),
                len(batch.forward.input_ids),
                MEMORY_REMEDY,
                error,
            )
        elif req.row >= 0:
            logger.error("Request %s ran out of memory in a step by itself and is aborted.", req.rid, exc_info=error)
            message = f"Out of memory in a step with this request alone: {error} {MEMORY_REMEDY}"
            self._owner.abort(req, message, 500, cache=False)

    def check_invariants(self, deep: bool) -> None:
        """Assert that steps are in order. With `deep`, also that each pending token belongs to a step."""
        assert self._in_flight is None or self._worker.runner.overlaps, "a step was not collected"
        assert self._planned is None or self._in_flight is not None, "a step is planned ahead, and none is in flight"
        if not deep:
            return
        batches = [] if self._in_flight is None else [self._in_flight[0]]
        batches += [] if self._planned is None else [self._planned]
        pending = dict.fromkeys(self._planner.running, 0)
        for batch in batches:
            for req in batch.sampled:
                if req in pending and req not in batch.left_out:
                    pending[req] += 1
        for req, count in pending.items():
            assert req.num_pending == count, f"{req.rid} has {req.num_pending} pending tokens, but {count} are sampled"
