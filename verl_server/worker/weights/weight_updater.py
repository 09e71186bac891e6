"""`WeightUpdater`: the only writer of a rank's weights and their version. It also releases and resumes memory.

One in each scheduler process. `handle` runs on every tensor-parallel rank at the same point of the command order, with
no step in flight. The `Scheduler` drains requests before `handle`, and starts a new version of its prefix cache after
it. The states of the weights (docs/scheduler-states.md has the tables for transactions, staging and generation):

    weights     generate  update  release(weights)  resume(weights)  after a success
    ----------  --------  ------  ----------------  ---------------  ---------------------------------
    serving     yes       yes     -> asleep         400              serving
    torn        503       yes     -> asleep         400              serving as soon as every parameter
    not_loaded  503       yes     -> asleep         400              was written since
    asleep      503       400     400               -> as before, if a backup restored it; not_loaded

    While the kv_cache is released, generation is answered 503 and updates work. Releasing released memory and resuming
    present memory is answered 400.

Every write belongs to a `Transaction`; a single update is a transaction of one call. From the first write until the end
of the transaction the weights count as *torn*. So neither a fault nor a writer that disappears can cause half an update
to be served. All ranks vote before the first write that each of them can write, and vote again after the copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightReq,
    WeightsCheckerReq,
)
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.receiver.names import bounded
from verl_server.weight_version import OwnVersions, new_incarnation
from verl_server.worker.agreement import agree
from verl_server.worker.weights.prepared import Prepared
from verl_server.worker.weights.stager import discard
from verl_server.worker.weights.transaction import State, Transaction
from verl_server.worker.weights.updated_model import ReleasableMemory, UpdatedModel
from verl_server.worker.weights.weight_inspector import WeightInspector
from verl_server.worker.weights.weight_sources import WeightSources

logger = logging.getLogger(__name__)
T = TypeVar("T")

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
_IN_TRANSACTION = "a transaction wrote some parameters and has not ended"
Outcome = tuple[str, Any]
"""(message, payload) of a reply."""


class WeightUpdater:
    def __init__(self, model: UpdatedModel, tp: TpGroup, sources: WeightSources, server_args: ServerArgs) -> None:
        self.state: State = "serving"
        self.version = server_args.loaded_version
        self.epoch = 0
        """Increases whenever no new request may use the KV pages that were computed before."""
        self._own_versions = OwnVersions(lambda: tp.gather(new_incarnation().encode())[0].decode())
        self._model, self._tp, self._sources = model, tp, sources
        self._inspector = WeightInspector(model.weight_map, tp)
        self._transaction: Transaction | None = None
        self._unwritten: Collection[str] = ()
        """Parameters that must be written before torn or not loaded weights can serve. Replaced, never changed."""
        self._torn_by = ""
        self._released: dict[str, None] = {}
        self._before_sleep: tuple[State, Collection[str]] | None = None
        """State and unwritten parameters before the release. They are valid again if the backup is restored."""

    def check(self, req: WeightReq) -> None:
        """Raise BadRequestError if the fields of `req` are wrong. Rank 0 calls this on arrival. Nothing is opened."""
        self._sources.check(req)

    def handle(self, req: WeightReq, prepared: Prepared | None = None) -> ControlReply:
        """Carry out a request on this rank. Every rank calls it, and rank 0's reply is sent.

        `prepared` is the result of the staging of a staged request. It is discarded in any case. Errors become replies,
        except that a dead rank raises RuntimeError.
        """
        try:
            message, payload = self._dispatch(req, prepared)
        except VerlServerError as error:
            return ControlReply(id=req.id, success=False, message=str(error), status_code=error.status_code)
        finally:
            if prepared is not None:
                discard(prepared)
        return ControlReply(id=req.id, success=True, message=message, payload=payload)

    @property
    def released(self) -> list[str]:
        """Tags of the memory that is released."""
        return list(self._released)

    def refusal(self) -> str | None:
        """Return the reason why generation cannot be served now, None if it can."""
        if self.state == "asleep":
            return "The weights are released. Call resume_memory_occupation(['weights']), then update them."
        if self.state == "not_loaded":
            return f"The weights are not loaded (they were resumed without contents): {self._still_unwritten()}"
        if self.state == "torn":
            return f"The weights are torn ({self._torn_by}): {self._still_unwritten()}"
        if "kv_cache" in self._released:
            return "The KV cache is released. Call resume_memory_occupation(['kv_cache'])."
        return None

    def _dispatch(self, req: WeightReq, prepared: Prepared | None) -> Outcome:
        if isinstance(req, UpdateReq):
            return self._update(req, prepared)
        match req:
            case BeginWeightUpdateReq():
                return self._begin(req)
            case EndWeightUpdateReq():
                return self._end(req)
            case RegisterWeightsReq():
                assert prepared is not None
                prepared.commit()
                self._sources.registrations.forget(req.forget)
                return f"Registered {len(req.description.tensors)} tensors.", {"registration": req.description.id}
            case UnregisterWeightsReq():
                self._sources.registrations.forget(req.registrations)
                return "Success", None
            case InitWeightsUpdateGroupReq():
                assert prepared is not None
                prepared.commit()
                return "Succeeded to initialize custom process group.", None
            case DestroyWeightsUpdateGroupReq():
                agree(self._tp, lambda: self._sources.groups.destroy(req.group_name))
                return "Succeeded to destroy custom process group.", None
            case UpdateWeightVersionReq():
                self._label(req.new_version)
                return f"Weight version updated to {self.version}", {
                    "new_version": self.version,
                    "weight_version": self.version,
                }
            case GetWeightsByNameReq():
                self._need_weights("read")
                return "Success", self._inspector.rows(req)
            case WeightsCheckerReq():
                return self._check(req)
            case ReleaseMemoryOccupationReq():
                return self._release(req.tags, req.cpu_backup)
            case ResumeMemoryOccupationReq():
                return self._resume(req.tags)

    # -- updates -----------------------------------------------------------------------------------------------

    def _update(self, req: UpdateReq, prepared: Prepared | None) -> Outcome:
        if isinstance(req, UpdateWeightsFromTensorReq):
            self._sources.registrations.forget(req.forget)
        self._need_weights("updated")
        start = time.perf_counter()
        transaction = self._transaction or self._new_transaction()
        # `start` is a moment of the host's monotonic clock, which the trainer can compare with its own. The others are
        # durations.
        seconds: dict[str, Any] = {"start": start}
        names = self._write(transaction, req, prepared, seconds)
        if self._transaction is None:
            self._need_whole_modules(names)  # those of an update that was received in parts are known only now
        transaction.label = req.weight_version or transaction.label
        seconds["commit"] = time.perf_counter() - start
        payload: dict[str, Any] = {"num_tensors": len(names), "seconds": seconds}
        if self._transaction is not None:
            return "Success", payload
        message, settled = self._settle(transaction)
        return message, payload | settled

    def _write(
        self, transaction: Transaction, req: UpdateReq, prepared: Prepared | None, seconds: dict[str, Any]
    ) -> list[str]:
        """Copy on all ranks, or raise on all ranks. Return the names of the written parameters.

        The ranks vote before the copy, so that no rank writes if one rank cannot write, and after it. `seconds` gets
        the durations: "agreed", from the start to the end of the first vote; "copy", the copy of each rank; and on a
        GPU "device", the copy of this rank on the device.
        """

        def find() -> Prepared:
            update = prepared
            if update is None:  # a push by id, which is not staged
                assert isinstance(req, UpdateWeightsFromTensorReq)
                update = self._sources.registered(req)
            update.ready()
            if self._transaction is None:
                self._need_whole_modules(update.names)
            self._need_loader()
            return update

        update = agree(self._tp, find)
        seconds["agreed"] = time.perf_counter() - seconds["start"]
        self._tear("an update failed before it was complete")
        seconds["copy"] = []
        try:
            agree(self._tp, lambda: self._copy(update, req, seconds), seconds["copy"])
        except VerlServerError as error:
            transaction.fail()
            self.epoch += 1
            if error.status_code < 500:
                self._tear("the last update contained NaN or infinity")
            raise
        transaction.wrote(update.names)
        self._tear(_IN_TRANSACTION)
        return update.names

    def _copy(self, update: Prepared, req: UpdateReq, seconds: dict[str, Any]) -> None:
        """Copy on this rank. Raise WeightUpdateError only for NaN and infinity; all other errors are faults."""
        try:
            with _DeviceTimer(self._model.device) as timer:
                update.commit()
            self._model.synchronize()
            seconds |= timer.seconds()
            nonfinite = update.nonfinite()
            update.confirm((isinstance(req, UpdateWeightsFromTensorReq) and req.checksums) or {})
        except (WeightUpdateError, BadRequestError) as error:  # these types would promise unchanged weights
            raise VerlServerError(str(error)) from error
        except RuntimeError as error:
            # The first error makes a CUDA context unusable, so no later update could end the state torn.
            if self._model.device.type == "cuda" and not isinstance(error, (torch.OutOfMemoryError, VerlServerError)):
                raise SystemExit(f"The device failed while weights were copied: {error}") from error
            raise
        if nonfinite and not req.allow_nonfinite:
            raise WeightUpdateError(
                f"The update holds NaN or infinity in {len(nonfinite)} of {len(update.names)} tensors: "
                f"{_listed(nonfinite)}. It was written, so generation is refused until all parameters are pushed "
                "again. (With allow_nonfinite=True such weights are served.)"
            )
        if nonfinite:
            logger.warning("Weights with NaN or infinity are served (allow_nonfinite): %s", _listed(nonfinite))

    def _settle(self, transaction: Transaction) -> tuple[str, dict[str, Any]]:
        """Make the written weights the new version. Return (message, fields of the reply about the version)."""
        not_covered = transaction.not_covered(self._model.weight_map.parameters)
        self._unwritten = transaction.still_unwritten() if not transaction.failed else ()
        self.state = transaction.state if self._unwritten else "serving"
        self._torn_by = transaction.torn_by
        self.epoch += 1
        self._label(transaction.label)
        logger.debug("Weights are now version %s: %d parameters", self.version, len(transaction.written))
        message = f"Success Weight version updated to {self.version}."
        if not_covered:
            total = len(self._model.weight_map.parameters)
            message += f" Not covered: {len(not_covered)} of {total} parameters ({_listed(not_covered)})."
        if self._unwritten:
            message += f" Not serving yet: {self._still_unwritten()}"
        return message, {"weight_version": self.version, "not_covered": bounded(not_covered)}

    def _new_transaction(self) -> Transaction:
        return Transaction(self.state, self._torn_by, self._unwritten)

    def _begin(self, req: BeginWeightUpdateReq) -> Outcome:
        self._need_weights("updated")
        self._transaction = self._new_transaction()
        self._transaction.full = req.transaction_id is not None if req.full is None else req.full
        return "Success", None

    def _end(self, req: EndWeightUpdateReq) -> Outcome:
        transaction = self._transaction
        assert transaction is not None, "rank 0 refuses an end without an open transaction"
        if req.discard:
            self._transaction = None
            if not transaction.touched:
                return "Success The transaction wrote nothing. The old weights are served.", None
            self.epoch += 1
            self._tear("a transaction wrote some parameters and was discarded")
            return f"Success The weights are torn: {self._still_unwritten()}", None

        def check() -> None:
            transaction.check_end(self._model.weight_map.parameters, partial=req.partial)
            self._need_whole_modules(list(transaction.written))

        agree(self._tp, check)
        transaction.label = req.weight_version or transaction.label
        self._transaction = None
        payload: dict[str, Any] = {"num_tensors": len(transaction.written)}
        if transaction.touched:
            message, settled = self._settle(transaction)
            return message, payload | settled
        if transaction.label is not None:
            self._label(transaction.label)
        not_covered = bounded(list(self._model.weight_map.parameters))
        payload |= {"weight_version": self.version, "not_covered": not_covered}
        return "Success The transaction wrote nothing.", payload

    def _need_loader(self) -> None:
        loader = self._model.weight_map.loader
        if loader is not None and loader.refusal:
            raise WeightUpdateError(loader.refusal)

    def _need_whole_modules(self, names: list[str]) -> None:
        """Raise WeightUpdateError if the model can install some of `names` only with parameters that are missing."""
        loader = self._model.weight_map.loader
        if loader is not None and names and (lacking := loader.lacking(names)):
            raise WeightUpdateError(
                f"This engine installs fused modules as a whole, and {len(lacking)} parameters of them are missing "
                f"({_listed(lacking)}). Push them in the same call, or in the same transaction."
            )

    def _tear(self, reason: str) -> None:
        self.state, self._torn_by = "torn", reason
        self._unwritten = self._model.weight_map.parameters

    def _label(self, version: str | None) -> None:
        """Set the version: the caller's label, or else one of this server's own. All ranks call it together."""
        if version:
            self._own_versions.note(version)
        self.version = version or self._own_versions.next_label()

    def _check(self, req: WeightsCheckerReq) -> Outcome:
        self._need_weights("checked")
        if req.action != "reset_tensors":
            return self._inspector.check(req)
        self.epoch += 1
        self._tear("weights_checker reset them")
        agree(self._tp, self._inspector.reset)
        return "The weights are random noise now. Update all of them.", None

    def _need_weights(self, what: str) -> None:
        if self.state == "asleep":
            raise WeightUpdateError(
                f"The weights are released and cannot be {what}. Call resume_memory_occupation(['weights']) first."
            )

    def _still_unwritten(self) -> str:
        names, total = list(self._unwritten), len(self._model.weight_map.parameters)
        return f"update the remaining {len(names)} of {total} parameters ({_listed(names)})."

    # -- memory ------------------------------------------------------------------------------------------------

    def _release(self, tags: list[str] | None, cpu_backup: bool | None) -> Outcome:
        memory = self._memory()
        present = [tag for tag in MEMORY_TAGS if tag not in self._released]
        chosen = _chosen(tags, present, "already released")
        memory.check_release(chosen)
        for tag in chosen:
            # Set before the release: if the release fails on one rank, `_resume` repairs all ranks.
            self._released[tag] = None
            self.epoch += 1
            if tag == "weights":
                before, self._before_sleep = (self.state, self._unwritten), None
                self.state = "asleep"
                self._sources.registrations.forget(None)  # trainers may free their memory after the release
                agree(self._tp, lambda: memory.release_weights(cpu_backup))
                self._before_sleep = before
            elif tag == "kv_cache":
                agree(self._tp, memory.release_kv_cache)
            else:
                memory.release_cuda_graphs()
        return "Success", None

    def _resume(self, tags: list[str] | None) -> Outcome:
        memory = self._memory()
        for tag in _chosen(tags, list(self._released), "not released"):
            if tag == "weights":
                restored = self._resume_all(memory.resume_weights, memory.release_weights)
                everywhere = all(flag == b"1" for flag in self._tp.gather(b"1" if restored else b"0"))
                if everywhere and self._before_sleep is not None:
                    self.state, self._unwritten = self._before_sleep
                else:
                    self.state, self._unwritten = "not_loaded", self._model.weight_map.parameters
            elif tag == "kv_cache":
                self._resume_all(memory.resume_kv_cache, memory.release_kv_cache)
            else:
                memory.resume_cuda_graphs()
            del self._released[tag]
        return "Success", None

    def _memory(self) -> ReleasableMemory:
        if self._model.memory is None:
            raise BadRequestError(
                "This engine cannot release memory on this device. Use the embedded engine, or stop the server "
                "meanwhile."
            )
        return self._model.memory

    def _resume_all(self, resume: Callable[[], T], release: Callable[[], None]) -> T:
        """Run `resume` on all ranks. If it fails on one rank, `release` the memory on all ranks and raise."""
        try:
            return agree(self._tp, resume)
        except VerlServerError:
            with contextlib.suppress(Exception):
                release()
            raise


class _DeviceTimer:
    """Measures the work that a `with` block enqueues on the current stream of a GPU; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        count = 2 if device.type == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]

    def __enter__(self) -> _DeviceTimer:
        for event in self._events[:1]:
            event.record()
        return self

    def __exit__(self, *_: object) -> None:
        for event in self._events[1:]:
            event.record()

    def seconds(self) -> dict[str, float]:
        """Return {"device": seconds of the work} after the device has finished the work. Empty on the CPU."""
        if not self._events:
            return {}
        start, end = self._events
        return {"device": start.elapsed_time(end) / 1e3}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _chosen(tags: list[str] | None, possible: list[str], why_not: str) -> list[str]:
    """Return the memory tags that a request names, or all `possible` tags if it names none.

    Raise BadRequestError, with `why_not`, if a tag is not among `possible`.
    """
    unknown = [tag for tag in tags or [] if tag not in MEMORY_TAGS]
    if unknown:
        raise BadRequestError(f"Unknown memory tags {unknown}. The known tags are {', '.join(MEMORY_TAGS)}.")
    wrong = [tag for tag in tags or [] if tag not in possible]
    if wrong or not possible:
        raise BadRequestError(f"{', '.join(wrong or MEMORY_TAGS)}: {why_not}.")
    return list(dict.fromkeys(tags or possible))
