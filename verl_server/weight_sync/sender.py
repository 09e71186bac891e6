"""The trainer's side: tensors in, handles out.

Called by every `EngineBase` implementation and by each rank of `VerlEngine`. Memory is described once and
remembered by storage, so the next push of the same parameters costs a comparison of pointers. What is handed
on (`LocalSerializedTensor`) refers to memory that this process owns: whoever pushes keeps the tensors alive,
and does not write to them, until the update was answered.

On CPU a storage is moved into shared memory, in place: parameters, views and optimizer keep working on it
(it can no longer be resized). Memory that a NumPy array or another library may refer to by address, page-locked
memory, and CUDA memory that cannot be exported are copied into shared memory at every push instead.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.handles import Allocation, LocalSerializedTensor, TensorHandle
from verl_server.weight_sync.shared_memory import Arena, describe_fd, out_of_memory, page_aligned

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Region:
    """Where one storage can be read by others; valid while the storage lives, unmoved."""

    storage: StorageWeakRef
    data_ptr: int
    nbytes: int
    allocation: Allocation
    offset: int = 0
    """Of the storage inside the allocation, in bytes."""
    staging: torch.UntypedStorage | None = None
    """A copy that is refreshed at every push, for a storage that cannot be shared."""

    def is_current(self, storage: torch.UntypedStorage) -> bool:
        return self.data_ptr == storage.data_ptr() and self.nbytes == storage.nbytes()


class WeightSender:
    """Remembers which storages of this process were made readable for others. Thread-safe."""

    def __init__(self) -> None:
        # Keyed by the StorageImpl's address, which the weak reference keeps from being used again.
        self._regions: dict[int, _Region] = {}
        self._lock = threading.Lock()
        self._warned = False

    def describe(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, LocalSerializedTensor]]:
        """Handles of `named_tensors`, in order. On an error every tensor still holds its values."""
        tensors = [(name, plain_tensor(name, tensor)) for name, tensor in named_tensors]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for _, t in tensors if t.untyped_storage().nbytes()}
        for device in {s.device for s in storages.values() if s.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # whatever wrote the tensors, on any stream, is done
        with self._lock:
            self._forget_freed()
            self._register([s for key, s in storages.items() if not self._is_registered(key, s)])
            for key, storage in storages.items():
                staging = self._regions[key].staging
                if staging is not None:
                    staging.copy_(storage)
            return [(name, LocalSerializedTensor(values=[self._handle(tensor)])) for name, tensor in tensors]

    def _handle(self, tensor: torch.Tensor) -> TensorHandle:
        region = self._regions.get(tensor.untyped_storage()._cdata)
        allocation = Allocation(id="", kind="shm", nbytes=0) if region is None else region.allocation
        start = 0 if region is None else region.offset // tensor.element_size()
        return TensorHandle(
            allocation=allocation,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            stride=list(tensor.stride()),
            storage_offset=start + int(tensor.storage_offset()),
        )

    def _is_registered(self, key: int, storage: torch.UntypedStorage) -> bool:
        region = self._regions.get(key)
        return region is not None and region.is_current(storage)

    def _forget_freed(self) -> None:
        for key in [key for key, region in self._regions.items() if region.storage.expired()]:  # type: ignore[no-untyped-call]
            del self._regions[key]

    def _register(self, storages: list[torch.UntypedStorage]) -> None:
        movable = []
        foreign = _foreign_memory([s for s in storages if s.device.type == "cpu"])
        for storage in storages:
            if storage.device.type == "cuda":
                self._export_cuda(storage)
            elif storage.device.type != "cpu":
                raise BadRequestError(
                    f"Weights on device '{storage.device}' cannot be shared; use CPU or CUDA tensors."
                )
            elif storage.is_shared():
                self._remember(storage, _describe_shared_by_torch(storage))
            elif storage._cdata in foreign:
                self._stage(storage)
            elif can_swap_storages():
                movable.append(storage)
            else:
                _check_dev_shm(storage.nbytes())
                self._remember(storage, _describe_shared_by_torch(storage))
        self._move(movable)

    def _remember(self, storage: torch.UntypedStorage, allocation: Allocation, offset: int = 0) -> _Region:
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        region = _Region(weak, storage.data_ptr(), storage.nbytes(), allocation, offset)
        self._regions[storage._cdata] = region
        return region

    def _move(self, storages: list[torch.UntypedStorage]) -> None:
        """Into one arena, one storage at a time, so that no more than one is held twice."""
        if not storages:
            return
        arena = Arena(sum(page_aligned(s.nbytes()) for s in storages))
        for storage in storages:
            offset, shared = arena.reserve(storage.nbytes())
            shared.copy_(storage)
            storage._swap_data_ptr_(shared)  # type: ignore[attr-defined]
            self._remember(storage, arena.describe(), offset)

    def _stage(self, storage: torch.UntypedStorage) -> None:
        arena = Arena(storage.nbytes())
        offset, shared = arena.reserve(storage.nbytes())
        self._remember(storage, arena.describe(), offset).staging = shared

    def _export_cuda(self, storage: torch.UntypedStorage) -> None:
        try:
            self._remember(storage, _describe_cuda(storage))
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "CUDA memory could not be exported (%s); such weights travel through a copy in shared memory, "
                    "which is much slower. Do not set expandable_segments for the trainer's allocator.",
                    str(error).splitlines()[0],
                )
            self._stage(storage)


def _describe_cuda(storage: torch.UntypedStorage) -> Allocation:
    """Export once; torch's count of importers is settled at once, for the protocol replaces it.

    torch would keep memory that the trainer frees until an importer decrements the export's counter. Our
    importers never outlive the update that named the memory (see `WeightReceiver`), during which the trainer
    keeps it, so the count would only hold memory back when a server dies.
    """
    _, handle, nbytes, offset, counter, counter_offset, _, _ = storage._share_cuda_()  # type: ignore[no-untyped-call]
    torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=storage.device)  # type: ignore[no-untyped-call]
    return Allocation(
        id=uuid.uuid4().hex,
        kind="cuda",
        nbytes=nbytes,
        pid=os.getpid(),
        device_uuid=str(torch.cuda.get_device_properties(storage.device).uuid),
        handle=handle,
        storage_offset_bytes=offset,
    )


def _foreign_memory(storages: list[torch.UntypedStorage]) -> set[int]:
    """Those on CPU whose memory must stay where it is: page-locked, or allocated by others than torch.

    The private mapping of a checkpoint file does not count as foreign: a model fresh from `from_pretrained`
    lies in such mappings, and nobody else holds the address.
    """
    foreign = [s for s in storages if not s.resizable() or (torch.cuda.is_available() and s.is_pinned())]
    if not foreign:
        return set()
    private = []
    with open("/proc/self/maps") as maps:
        for span, mode, _, _, inode, *_ in (line.split() for line in maps):
            if mode.endswith("p") and inode != "0":
                start, end = (int(part, 16) for part in span.split("-"))
                private.append((start, end))
    return {s._cdata for s in foreign if not any(start <= s.data_ptr() < end for start, end in private)}


def can_swap_storages() -> bool:
    """torch 2.12 and later can exchange the memory of two storages."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def _describe_shared_by_torch(storage: torch.UntypedStorage) -> Allocation:
    """Memory that torch shares already (`share_memory_()`), or moves itself on releases that cannot swap."""
    try:
        fd, nbytes = storage._share_fd_cpu_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise WeightUpdateError(f"Could not place {storage.nbytes():,} bytes into shared memory: {error}") from None
    return describe_fd(fd, nbytes, uuid.uuid4().hex)


def _check_dev_shm(nbytes: int) -> None:
    """torch writes into /dev/shm without reserving first: running out there would be SIGBUS."""
    status = os.statvfs("/dev/shm")
    if status.f_bavail * status.f_frsize < nbytes:
        raise out_of_memory(OSError(28, "No space left in /dev/shm"), nbytes)


def plain_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as memory: detached, a `DTensor` that is whole on this rank without its wrapper."""
    if isinstance(tensor, DTensor):
        if not is_whole(tensor):
            raise BadRequestError(
                f"'{name}' is a DTensor with placements {tensor.placements}: this rank holds only a part. "
                "Push it through VerlEngine on every rank, or pass `gather_full_tensors(named_tensors)`."
            )
        tensor = tensor.to_local()
    if not isinstance(tensor, torch.Tensor):
        raise BadRequestError(f"'{name}' is a {type(tensor).__name__}, not a torch.Tensor.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_neg():
        raise BadRequestError(f"'{name}' ({tensor.layout}, device '{tensor.device}') has no plain memory to share.")
    return tensor.detach()


def is_whole(tensor: DTensor) -> bool:
    """Whether this rank holds all of it."""
    return tensor.device_mesh.size() == 1 or all(placement.is_replicate() for placement in tensor.placements)


def gather_full_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Replace sharded DTensors by full tensors; every rank of their mesh must call this with the same names.

    The caller keeps the result alive until the update was answered: full tensors are temporaries.
    """
    return [
        (name, tensor.full_tensor() if isinstance(tensor, DTensor) and not is_whole(tensor) else tensor)
        for name, tensor in named_tensors
    ]


_sender = WeightSender()  # one for the process, as the memory is the process's


def describe_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, LocalSerializedTensor]]:
    """Handles through which the schedulers of this host read `named_tensors`; see the module's docstring."""
    return _sender.describe(named_tensors)
