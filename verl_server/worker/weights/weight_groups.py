"""`WeightGroups`: the process groups, by name, through which trainers on other hosts send weights.

Each rank's `WeightSources` has one. The stager's threads join groups and receive tensors. An update that fits
`weight_receive_bytes` is received completely before anything is written, so the old weights stay if the trainer dies. A
larger update is received window by window during the commit, with generation stopped, and a failure leaves the weights
torn.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch

from verl_server.errors import BadRequestError, ControlTimeoutError, VerlServerError, WeightUpdateError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq, UpdateWeightsFromDistributedReq
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.group.process_group import WeightGroup
from verl_server.weight_sync.receiver.names import listed
from verl_server.weight_sync.receiver.plan import UpdatePlan
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver
from verl_server.worker.weights.prepared import Announced, Done, Prepared, Received, Streamed, Window
from verl_server.worker.weights.updated_model import UpdatedModel

STATE_DICTS = "state_dicts"
"""`load_format` of an update whose tensors the trainer describes in its broadcasts."""


class WeightGroups:
    def __init__(self, receiver: WeightReceiver, model: UpdatedModel, tp: TpGroup, server_args: ServerArgs) -> None:
        self._receiver, self._model, self._args = receiver, model, server_args
        self._rank, self._size = tp.rank, tp.size
        self._groups: dict[str, WeightGroup] = {}
        self._lock = threading.Lock()
        self._budget = ReceiveBudget(server_args.weight_receive_bytes, server_args.control_timeout)

    def join(self, req: InitWeightsUpdateGroupReq) -> Done:
        """Join the trainer's group within `control_timeout` seconds.

        If the name has a group whose trainer has ended, that group is left first. Raise BadRequestError if the name has
        a working group, and WeightUpdateError if the new group cannot be joined.
        """
        with self._lock:
            old = self._groups.get(req.group_name)
            if old is not None and not old.has_ended:
                raise BadRequestError(
                    f"Failed to initialize custom process group: '{req.group_name}' exists. Destroy it first."
                )
            self._groups.pop(req.group_name, None)
        if old is not None:
            old.close()
        group = WeightGroup.join(req, self._rank, self._model.device, self._args.control_timeout)
        with self._lock:
            self._groups[req.group_name] = group
        return Done(lambda: self._undo_join(req.group_name))

    def destroy(self, name: str) -> None:
        """Leave a group within a bounded time. A receive in progress fails.

        Raise BadRequestError if there is no such group.
        """
        with self._lock:
            group = self._groups.pop(name, None)
        if group is None:
            raise BadRequestError("The group to be destroyed does not exist.")
        group.close()

    def lost(self, name: str) -> None:
        """Close a group from which a rank cannot receive any more. The next `join` of its name replaces it."""
        with self._lock:
            group = self._groups.get(name)
        if group is not None:
            group.close()

    def receive(self, req: UpdateWeightsFromDistributedReq) -> Prepared:
        """Receive an update, or prepare to receive it during the commit.

        An update that will be refused is received too, because the trainer's broadcasts would hang otherwise.
        """
        with self._lock:
            group = self._groups.get(req.group_name)
        if group is None:
            raise BadRequestError(
                f"There is no process group '{req.group_name}'. Call init_weights_update_group first."
            )
        limit = self._args.weight_receive_bytes
        if req.load_format == STATE_DICTS:
            return self._announced(req, group, limit)
        held = min(total_bytes(req), limit)
        self._budget.acquire(held)
        try:
            windows = Arriving(
                group.receive(req.names, req.dtypes, req.shapes, req.load_format, limit, req.packed_buffer_size_bytes)
            )
            if total_bytes(req) > limit:
                return self._streamed(req, group, windows, held)
            received = Received(
                lambda: self._plan([entry for window in windows for entry in window], req),
                lambda: self._release(group, windows, held),
            )
            self._receive_now(received)
            return received
        except BaseException:
            self._budget.release(held)
            raise

    def _receive_now(self, update: Received | Announced) -> None:
        """Receive during staging, unless this could deadlock.

        Two NCCL communicators have no common order. A receive could deadlock with the all-reduces of a tensor-parallel
        model, so it waits until generation is stopped.
        """
        if not (self._size > 1 and self._model.device.type == "cuda"):
            update.ready()
            self._model.synchronize()

    def _announced(self, req: UpdateWeightsFromDistributedReq, group: WeightGroup, limit: int) -> Announced:
        self._budget.acquire(limit)
        windows = Arriving(group.receive_state_dicts())

        def write(window: Window) -> tuple[list[str], list[str]]:
            part = self._receiver.plan(window, strict_dtype=req.strict_dtype, partial=True)
            return part.names, self._write_part(part)

        def check_complete(names: list[str]) -> None:
            missing = self._model.weight_map.missing(names)
            if missing and not req.partial:
                raise WeightUpdateError(f"The update does not cover every parameter; missing: {listed(missing)}.")

        try:
            update = Announced(
                windows,
                lambda tensors, is_part: self._receiver.plan(
                    tensors, strict_dtype=req.strict_dtype, partial=req.partial or is_part
                ),
                write,
                check_complete,
                lambda: self._release(group, windows, limit),
                most_bytes=limit,
            )
            self._receive_now(update)
            return update
        except BaseException:
            self._release(group, windows, limit)
            raise

    def _write_part(self, part: UpdatePlan) -> list[str]:
        """Copy one window of an update. Return the names of tensors with NaN or infinity."""
        part.commit()
        self._model.synchronize()  # the next window may reuse the memory of this one
        nonfinite = part.nonfinite()
        part.close()
        return nonfinite

    def _streamed(
        self, req: UpdateWeightsFromDistributedReq, group: WeightGroup, windows: Arriving, held: int
    ) -> Streamed:
        described = zip(req.names, req.dtypes, req.shapes, strict=True)
        try:
            plan = self._plan(
                [(name, torch.empty(shape, dtype=torch_dtype(d), device="meta")) for name, d, shape in described], req
            )
        except VerlServerError:
            for _ in windows:
                pass
            raise

        def write(window: Window) -> list[str]:
            return self._write_part(self._receiver.plan(window, strict_dtype=req.strict_dtype, partial=True))

        return Streamed(plan.names, windows, write, lambda: self._release(group, windows, held))

    def _plan(self, tensors: Window, req: UpdateWeightsFromDistributedReq) -> UpdatePlan:
        return self._receiver.plan(tensors, strict_dtype=req.strict_dtype, partial=req.partial)

    def _release(self, group: WeightGroup, windows: Arriving, held: int) -> None:
        if not windows.complete:  # the next broadcast of the trainer is unknown
            group.close()
        self._budget.release(held)

    def _undo_join(self, name: str) -> None:
        with contextlib.suppress(BadRequestError):
            self.destroy(name)


class Arriving:
    """Iterator over the windows of one update as they arrive.

    If the trainer ends during the update, the iterator raises an error with status 500. The vote sends the status to
    all ranks, so that every rank knows that the group is lost.
    """

    def __init__(self, windows: Iterator[Window]) -> None:
        self._windows = windows
        self.complete = False

    def __iter__(self) -> Iterator[Window]:
        try:
            yield from self._windows
        except WeightUpdateError as error:
            raise VerlServerError(str(error)) from error
        self.complete = True


class ReceiveBudget:
    """Bounds the bytes of received tensors that are not written yet."""

    def __init__(self, nbytes: int, timeout: float) -> None:
        self._free, self._timeout = nbytes, timeout
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> None:
        """Wait until `nbytes` more bytes are within the bound, then count them.

        Raise ControlTimeoutError after the timeout.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: nbytes <= self._free, self._timeout):
                raise ControlTimeoutError(
                    f"Tensors received earlier were not written within {self._timeout:g} s (control_timeout), so "
                    "there is no room to receive more (weight_receive_bytes)."
                )
            self._free -= nbytes

    def release(self, nbytes: int) -> None:
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()


def check_lists(req: UpdateWeightsFromDistributedReq) -> None:
    """Raise BadRequestError if names, dtypes and shapes do not describe tensors."""
    counts = [len(req.names), len(req.dtypes), len(req.shapes)]
    if req.load_format == STATE_DICTS:
        if any(counts):
            raise BadRequestError(
                f"load_format='{STATE_DICTS}': names, dtypes and shapes must be empty, because the trainer broadcasts "
                "them with the tensors."
            )
        return
    if len(set(counts)) != 1 or not req.names:
        raise BadRequestError(f"names, dtypes and shapes must have the same length, at least 1, not {counts}.")
    if req.load_format not in (None, "auto", "flattened_bucket", "packed"):
        raise BadRequestError(
            f"load_format={req.load_format!r} is not supported; use null, 'flattened_bucket', 'packed' or "
            f"'{STATE_DICTS}'."
        )
    if req.packed_buffer_size_bytes < 1:
        raise BadRequestError(f"packed_buffer_size_bytes must be at least 1, not {req.packed_buffer_size_bytes}.")
    for name, dtype, shape in zip(req.names, req.dtypes, req.shapes, strict=True):
        torch_dtype(dtype)
        if min(shape, default=0) < 0 or math.prod(shape) >= 2**48:
            raise BadRequestError(f"'{name[:100]}': {shape[:16]} is not the shape of a tensor.")


def total_bytes(req: UpdateWeightsFromDistributedReq) -> int:
    """Return the bytes of all tensors that `req` describes."""
    return sum(math.prod(shape) * torch_dtype(d).itemsize for d, shape in zip(req.dtypes, req.shapes, strict=True))


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name with or without the prefix "torch.". Raise BadRequestError if it is unknown."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BadRequestError(f"dtype {name[:50]!r} is not a dtype of torch.")
    return dtype
