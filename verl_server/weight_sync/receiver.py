"""The server's side: named sources in, weights replaced in place.

Held by each rank's `WeightUpdater`. `stage` opens the trainer's memory and checks everything that can be
checked (names, shapes, dtypes, bounds, coverage) without writing a byte; `UpdatePlan.commit` copies. What came
over the wire is never trusted: a view that leaves its allocation would read, or crash on, foreign memory.

Shared memory stays mapped as long as updates use it and its owner lives; CUDA memory is closed as soon as an
update has been answered, for an importer must not outlive the owner's free.
"""

from __future__ import annotations

import difflib
import math
import os
import select
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_server.errors import WeightUpdateError
from verl_server.models.loader import WeightMap
from verl_server.weight_sync.handles import Allocation, LocalSerializedTensor, TensorHandle
from verl_server.weight_sync.shared_memory import open_shared

_FLOATING = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Path segments that DDP, torch.compile and FSDP put into parameter names."""
_LISTED = 8


@dataclass(frozen=True)
class UpdatePlan:
    """A checked update, ready to be copied."""

    names: list[str]
    """Parameters that it replaces, by their names in the `WeightMap`."""
    destinations: list[Tensor]
    sources: list[Tensor]

    @torch.no_grad()
    def commit(self) -> None:
        """Copy in place, converting dtypes. An error in here leaves the weights torn."""
        if self.destinations:
            torch._foreach_copy_(self.destinations, self.sources)


class WeightReceiver:
    """Opens what trainers describe and plans its way into this rank's parameters."""

    def __init__(self, weight_map: WeightMap, rank: int, size: int, device: torch.device) -> None:
        self._map = weight_map
        self._rank, self._size = rank, size
        self._memory = OpenAllocations(device)

    def stage(
        self, named_tensors: list[tuple[str, LocalSerializedTensor]], *, strict_dtype: bool, partial: bool
    ) -> UpdatePlan:
        """Check an update that travels as handles, and open its memory."""
        handles = [(name, self._value(name, value)) for name, value in named_tensors]
        self._memory.keep_only([handle.allocation for _, handle in handles])
        sources = [(name, self._memory.view(name, handle)) for name, handle in handles]
        return self.plan(sources, strict_dtype=strict_dtype, partial=partial)

    def plan(self, named_tensors: list[tuple[str, Tensor]], *, strict_dtype: bool, partial: bool) -> UpdatePlan:
        """Check full tensors against the model and pair their parts with this rank's parameters."""
        sources = self._by_slot(named_tensors)
        if not partial:
            missing = self._map.missing(sources)
            if missing:
                raise WeightUpdateError(f"The update does not cover every parameter; missing: {_listed(missing)}.")
        destinations, parts = [], []
        for name, source in sources.items():
            slot = self._map.slots[name]
            _check_fits(name, source, slot.shape, slot.dtype, strict_dtype)
            for destination, index in slot.pieces:
                destinations.append(destination)
                parts.append(source[index])
        return UpdatePlan(list(sources), destinations, parts)

    def finish(self) -> None:
        """The update is over, whatever its result."""
        self._memory.close_cuda()

    def close(self) -> None:
        """Forget every mapping."""
        self._memory.keep_only([])

    def _value(self, name: str, value: LocalSerializedTensor) -> TensorHandle:
        if len(value.values) not in (1, self._size):
            raise WeightUpdateError(
                f"'{name}' has {len(value.values)} values, but this server has {self._size} tensor-parallel rank(s): "
                "give one value for all, or one for each."
            )
        return value.get(self._rank)

    def _by_slot(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Sources by the model's names; duplicates, unknown names and a contradicting tied head are refused."""
        found: dict[str, Tensor] = {}
        tied: list[tuple[str, Tensor]] = []
        unknown: list[str] = []
        for name, tensor in named_tensors:
            known = self._known_name(name)
            if self._map.unknown([known]):
                unknown.append(name)
            elif known in self._map.aliases:
                tied.append((known, tensor))
            elif known in found:
                raise WeightUpdateError(f"The update has '{known}' twice; it came again as '{name}'.")
            elif known in self._map.slots:
                found[known] = tensor
        if unknown:
            raise WeightUpdateError(self._unknown_message(unknown))
        for name, tensor in tied:
            self._settle_tied(name, tensor, found)
        if not found:
            raise WeightUpdateError("The update has no tensors.")
        return found

    def _settle_tied(self, name: str, tensor: Tensor, found: dict[str, Tensor]) -> None:
        """A tied head may come besides the embedding if it is equal, or alone, then it is the embedding."""
        canonical = self._map.aliases[name]
        twin = found.setdefault(canonical, tensor)
        same_memory = twin.data_ptr() == tensor.data_ptr() and twin.stride() == tensor.stride()
        if twin.shape != tensor.shape or not (same_memory or torch.equal(twin, tensor)):
            raise WeightUpdateError(
                f"'{name}' differs from '{canonical}', but this model ties them (tie_word_embeddings=true). "
                "Leave it out, or tie them in the trainer too."
            )

    def _known_name(self, name: str) -> str:
        if name in self._map.slots or name in self._map.aliases:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    def _unknown_message(self, unknown: list[str]) -> str:
        known = [*self._map.slots, *self._map.aliases]
        hints = [f"'{n}' is like '{m}'" for n in unknown[:3] for m in difflib.get_close_matches(n, known, 1, 0.7)]
        hint = f" {'; '.join(hints)}." if hints else f" The model has, for example, '{known[0]}'."
        return f"The model has no parameter {_listed(unknown)}.{hint}"


class OpenAllocations:
    """Trainers' memory that this process has mapped, by allocation id."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, tuple[Allocation, Tensor]] = {}
        self._owners: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()  # the owners' watchers close mappings too

    def view(self, name: str, handle: TensorHandle) -> Tensor:
        """The described tensor, as a view into its owner's memory."""
        try:
            dtype = _check_view(handle)
            if math.prod(handle.shape) == 0:
                return torch.empty(handle.shape, dtype=dtype)
            data = self._opened(handle.allocation)
            usable = data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            return usable.as_strided(handle.shape, handle.stride, handle.storage_offset)
        except WeightUpdateError as error:
            raise WeightUpdateError(f"'{name}': {error}") from None
        except (RuntimeError, TypeError) as error:  # dimensions beyond what a tensor can have
            message = str(error).splitlines()[0]
            raise WeightUpdateError(f"'{name}': its shape and stride do not describe a tensor ({message}).") from None

    def keep_only(self, allocations: list[Allocation]) -> None:
        """Close what the coming update does not use."""
        used = {allocation.id for allocation in allocations}
        with self._lock:
            self._open = {key: entry for key, entry in self._open.items() if key in used}

    def close_cuda(self) -> None:
        with self._lock:
            self._open = {key: entry for key, entry in self._open.items() if entry[0].kind == "shm"}

    def _opened(self, allocation: Allocation) -> Tensor:
        with self._lock:
            known = self._open.get(allocation.id)
        if known is not None and known[0] == allocation:
            return known[1]
        data = open_shared(allocation) if allocation.kind == "shm" else _open_cuda(allocation, self._device)
        with self._lock:
            self._open[allocation.id] = (allocation, data)
            if allocation.kind == "shm" and allocation.pid not in self._owners:
                self._watch(allocation.pid)
        return data

    def _watch(self, pid: int) -> None:
        """When the owner exits, unmap its memory; otherwise a model's worth would stay until the next update."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # gone already: the next update closes the mapping
        name = f"weights-of-{pid}"
        self._owners[pid] = threading.Thread(target=self._close_after, args=(pid, pidfd), name=name, daemon=True)
        self._owners[pid].start()

    def _close_after(self, pid: int, pidfd: int) -> None:
        exited = select.poll()
        exited.register(pidfd, select.POLLIN)
        exited.poll()
        os.close(pidfd)
        with self._lock:
            self._open = {key: entry for key, entry in self._open.items() if entry[0].pid != pid}
            del self._owners[pid]


def _check_view(handle: TensorHandle) -> torch.dtype:
    """A view must lie inside its allocation, whoever says otherwise. Returns its dtype."""
    dtype = _FLOATING.get(handle.dtype)
    if dtype is None:
        raise WeightUpdateError(
            f"dtype {handle.dtype} is not among {', '.join(_FLOATING)}; weights are floating point."
        )
    shape, stride, offset = handle.shape, handle.stride, handle.storage_offset
    if len(shape) != len(stride) or min([*shape, *stride, offset], default=0) < 0:
        raise WeightUpdateError(f"shape {shape}, stride {stride} and offset {offset} do not describe a tensor.")
    end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if math.prod(shape) and end * dtype.itemsize > handle.allocation.nbytes:
        raise WeightUpdateError(
            f"shape {shape} with stride {stride} from offset {offset} needs {end * dtype.itemsize:,} bytes, but its "
            f"allocation has {handle.allocation.nbytes:,}."
        )
    return dtype


def _check_fits(name: str, source: Tensor, shape: tuple[int, ...], dtype: torch.dtype, strict: bool) -> None:
    if tuple(source.shape) != shape:
        raise WeightUpdateError(f"'{name}' has shape {list(source.shape)}, but the model's is {list(shape)}.")
    if source.dtype not in _FLOATING.values():
        raise WeightUpdateError(f"'{name}' has dtype {source.dtype}, but weights are floating point ({dtype}).")
    if strict and source.dtype != dtype:
        raise WeightUpdateError(f"'{name}' is {source.dtype}, the model's is {dtype}, and strict_dtype=True.")


def _open_cuda(allocation: Allocation, device: torch.device) -> Tensor:
    """Open with the local device current, also a peer's memory, or a context would appear on the peer's GPU."""
    if device.type != "cuda":
        raise WeightUpdateError("This server runs on the CPU and cannot read GPU memory. Push CPU tensors.")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    # A pickle of torch's brings a counter of importers, which closing decrements; our sender's needs none.
    counter = allocation.ref_counter_handle or b"/verl_no_counter"
    try:
        storage = torch.UntypedStorage._new_shared_cuda(  # type: ignore[no-untyped-call]
            device.index or 0,
            allocation.handle,
            allocation.nbytes,
            allocation.storage_offset_bytes,
            counter,
            allocation.ref_counter_offset,
            allocation.event_handle,
            allocation.event_sync_required,
        )
    except RuntimeError as error:
        raise WeightUpdateError(
            f"Cannot open GPU memory of process {allocation.pid} on {allocation.device_uuid}: "
            f"{str(error).splitlines()[0]}. Is that process alive, on this host, another process than the server, "
            "its GPU the server's or a peer of it, and its allocator without expandable_segments?"
        ) from None
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (allocation.nbytes,), (1,))


def _listed(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(f"'{name}'" for name in names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
