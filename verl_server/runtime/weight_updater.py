"""`WeightUpdater`: the only writer of a rank's weights, of their version, and of what memory is there.

One in each scheduler process. `handle` runs on every tensor-parallel rank at the same point of the command
order, with no step in flight; around it the scheduler drains requests and renews its prefix cache. Who may do
what (`kv_cache` and `cuda_graph` besides are just present or released):

    weights     generate  update  release(weights)  resume(weights)  after a successful update
    ----------  --------  ------  ----------------  ---------------  -------------------------------------
    serving     yes       yes     -> asleep         400              serving
    torn        503       yes     -> asleep         400              serving as soon as every parameter was
    not_loaded  503       yes     -> asleep         400              written since (in several calls)
    asleep      503       400     400               -> not_loaded    -

    kv_cache released: generation 503; updates work. Releasing twice or resuming what is there: 400.

An update is staged (checked, opened) on all ranks, which then vote: one refusal refuses it everywhere, and
nothing was written. From the first write the weights are *torn*, until all ranks have copied and voted again,
so no error, of whatever kind, can leave half an update being served.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError
from verl_server.io_struct import (
    ControlReply,
    GetWeightsByNameReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightReq,
    WeightsCheckerReq,
)
from verl_server.models.config import resolve_model_folder
from verl_server.models.loader import iter_checkpoint
from verl_server.runtime.agreement import agree
from verl_server.runtime.model_runner import ModelRunner
from verl_server.runtime.tp_group import TpGroup
from verl_server.runtime.weight_inspector import WeightInspector
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.receiver import UpdatePlan, WeightReceiver

logger = logging.getLogger(__name__)

State = Literal["serving", "torn", "not_loaded", "asleep"]
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
Outcome = tuple[str, Any]
"""(message, payload) of a reply."""


class WeightUpdater:
    def __init__(self, runner: ModelRunner, tp: TpGroup, server_args: ServerArgs) -> None:
        self.state: State = "serving"
        self.version = server_args.weight_version
        self._newest_number = int(self.version) if self.version.isdecimal() else 0
        self._runner, self._tp = runner, tp
        self._receiver = WeightReceiver(runner.weight_map, tp.rank, tp.size, runner.device)
        self._inspector = WeightInspector(runner.weight_map, tp)
        self._unwritten: dict[str, None] = {}
        """Parameters that must still be written before the weights can serve (torn, not_loaded)."""
        self._torn_by = ""
        self._released: dict[str, None] = {}

    def handle(self, req: WeightReq) -> ControlReply:
        """Carry out a request on every rank; rank 0's reply is the answer. Raises only if a rank is dead."""
        try:
            message, payload = self._dispatch(req)
        except VerlServerError as error:
            return ControlReply(id=req.id, success=False, message=str(error), status_code=error.status_code)
        return ControlReply(id=req.id, success=True, message=message, payload=payload)

    def precheck(self, req: UpdateReq) -> ControlReply | None:
        """The refusal of an update that is wrong whatever the other ranks say; None if there is none to see yet.

        Rank 0, before any running request is disturbed for the update. Writes nothing, and what it opened is
        found open by `handle`.
        """
        try:
            self._staging(req)()
        except VerlServerError as error:
            self._receiver.close()  # thousands of regions may be open by now, each with a descriptor
            return ControlReply(id=req.id, success=False, message=str(error), status_code=error.status_code)
        except Exception:
            logger.exception("The check of an update failed")  # so will the vote on it, on all ranks alike
        return None

    def refusal(self) -> str | None:
        """Why generation cannot be served now; None if it can."""
        if self.state == "asleep":
            return "The weights are released. Call resume_memory_occupation(['weights']), then update them."
        if self.state == "not_loaded":
            return f"The weights are not loaded since they were resumed: {self._still_unwritten()}"
        if self.state == "torn":
            return f"The weights are torn ({self._torn_by}): {self._still_unwritten()}"
        if "kv_cache" in self._released:
            return "The KV cache is released. Call resume_memory_occupation(['kv_cache'])."
        return None

    def _dispatch(self, req: WeightReq) -> Outcome:
        match req:
            case UpdateWeightsFromTensorReq() | UpdateWeightsFromDiskReq():
                try:
                    return self._update(self._staging(req), req.weight_version)
                finally:
                    self._receiver.finish()
            case UpdateWeightVersionReq():
                self._label(req.new_version)
                return f"Weight version updated to {self.version}", {"new_version": self.version}
            case GetWeightsByNameReq():
                self._need_weights("read")
                return "Success", self._inspector.rows(req)
            case WeightsCheckerReq():
                return self._check(req)
            case ReleaseMemoryOccupationReq():
                return self._release(req.tags)
            case ResumeMemoryOccupationReq():
                return self._resume(req.tags)

    # -- updates -----------------------------------------------------------------------------------------------

    def _staging(self, req: UpdateReq) -> Callable[[], UpdatePlan]:
        """The check of an update's source, which gives the plan of its copies."""
        if isinstance(req, UpdateWeightsFromTensorReq):
            if req.load_format not in (None, "auto"):
                raise BadRequestError(f"load_format={req.load_format!r} is not supported here; leave it unset.")
            named, strict_dtype, partial = req.named_tensors, req.strict_dtype, req.partial
            return lambda: self._receiver.stage(named, strict_dtype=strict_dtype, partial=partial)
        if req.load_format not in (None, "auto", "safetensors"):
            raise BadRequestError(f"load_format={req.load_format!r} is not supported; use 'auto' or 'safetensors'.")
        path = req.model_path

        def stage() -> UpdatePlan:
            tensors = list(iter_checkpoint(resolve_model_folder(path, None)))  # mapped, not read yet
            return self._receiver.plan(tensors, strict_dtype=False, partial=False)

        return stage

    def _update(self, stage: Callable[[], UpdatePlan], label: str | None) -> Outcome:
        self._need_weights("updated")
        start = time.perf_counter()
        plan = agree(self._tp, stage)
        staged = time.perf_counter()
        before, unwritten = self.state, self._unwritten
        self._tear("an update failed half way")
        agree(self._tp, lambda: self._commit(plan))
        written = dict.fromkeys(plan.names)
        self._unwritten = {name: None for name in unwritten if name not in written}
        self.state = before if self._unwritten else "serving"
        self._label(label or str(self._newest_number + 1))
        done = time.perf_counter()
        seconds = {"stage": staged - start, "commit": done - staged}
        logger.debug("Weights are now version %s: %d tensors, %s", self.version, len(plan.names), seconds)
        message = f"Success Weight version updated to {self.version}."
        if self._unwritten:
            message += f" Not serving yet: {self._still_unwritten()}"
        return message, {"weight_version": self.version, "num_tensors": len(plan.names), "seconds": seconds}

    def _commit(self, plan: UpdatePlan) -> None:
        plan.commit()
        self._runner.synchronize()

    def _tear(self, reason: str) -> None:
        self.state, self._torn_by = "torn", reason
        self._unwritten = dict.fromkeys(self._runner.weight_map.slots)

    def _label(self, version: str) -> None:
        """Default labels count on from the largest number seen, so that none is used twice."""
        self.version = version
        if version.isdecimal():
            self._newest_number = max(self._newest_number, int(version))

    def _check(self, req: WeightsCheckerReq) -> Outcome:
        self._need_weights("checked")
        if req.action != "reset_tensors":
            return self._inspector.check(req)
        self._tear("they were reset by weights_checker")
        agree(self._tp, self._inspector.reset)
        return "The weights are noise now; update all of them.", None

    def _need_weights(self, what: str) -> None:
        if self.state == "asleep":
            raise WeightUpdateError(
                f"The weights are released and cannot be {what}. Call resume_memory_occupation(['weights']) first."
            )

    def _still_unwritten(self) -> str:
        names, total = list(self._unwritten), len(self._runner.weight_map.slots)
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"update the remaining {len(names)} of {total} parameters ({listed})."

    # -- memory ------------------------------------------------------------------------------------------------

    def _release(self, tags: list[str] | None) -> Outcome:
        present = [tag for tag in MEMORY_TAGS if tag not in self._released]
        for tag in _chosen(tags, present, "released already"):
            # Marked before it is done: should it fail on a rank, resume puts all ranks in order again.
            self._released[tag] = None
            if tag == "weights":
                self.state = "asleep"
                self._receiver.close()
                agree(self._tp, self._runner.release_weights)
            elif tag == "kv_cache":
                agree(self._tp, self._runner.release_kv_cache)
        return "Success", None

    def _resume(self, tags: list[str] | None) -> Outcome:
        for tag in _chosen(tags, list(self._released), "not released"):
            if tag == "weights":
                self._take_or_none(self._runner.resume_weights, self._runner.release_weights)
                self.state = "not_loaded"
                self._unwritten = dict.fromkeys(self._runner.weight_map.slots)
            elif tag == "kv_cache":
                self._take_or_none(self._runner.resume_kv_cache, self._runner.release_kv_cache)
            del self._released[tag]
        return "Success", None

    def _take_or_none(self, take: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Memory may be short on one rank only: then no rank keeps it."""
        try:
            agree(self._tp, take)
        except VerlServerError:
            with contextlib.suppress(Exception):
                give_back()
            raise


def _chosen(tags: list[str] | None, possible: list[str], why_not: str) -> list[str]:
    """The tags that a request names (all possible ones if it names none); BadRequestError if one is not possible."""
    unknown = [tag for tag in tags or [] if tag not in MEMORY_TAGS]
    if unknown:
        raise BadRequestError(f"Unknown memory tags {unknown}; known: {', '.join(MEMORY_TAGS)}.")
    wrong = [tag for tag in tags or [] if tag not in possible]
    if wrong or not possible:
        raise BadRequestError(f"{', '.join(wrong or MEMORY_TAGS)}: {why_not}.")
    return list(dict.fromkeys(tags or possible))
