"""Makes storages of this process readable for other processes. Each storage is exported once.

One `Exports` serves the whole process. `sender` requests the region of every storage that is pushed. On the CPU a
storage is moved into shared memory, in place: parameters, views and optimizer continue to use the same storage, which
can no longer be resized. A child that is forked later shares this memory: if the child writes to an inherited
parameter, the parent's parameter changes. Three kinds of memory are copied into shared memory at every push instead:
memory that a NumPy array or another library may refer to by address, page-locked memory, and CUDA memory that cannot be
exported.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.handles import Allocation
from verl_server.weight_sync.shared_memory import Arena, describe_fd, out_of_memory, page_aligned

logger = logging.getLogger(__name__)

_BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID: the driver's number of an allocation, which is unique in the life of the process."""
_CUDA_MALLOC = b"c"
"""Second byte of torch's handle of memory from cudaMalloc. The first byte is a version.

A second byte "e" means an expandable segment. Its pages can be exchanged under the same address, and another process
may not be allowed to open it.
"""


@dataclass(slots=True)
class Region:
    """The memory in which other processes can read one storage."""

    storage: StorageWeakRef
    """Weak reference to the storage.

    It keeps the address of the StorageImpl from being reused, but does not keep the memory.
    """
    device: torch.device
    data_ptr: int
    nbytes: int
    allocation: Allocation
    offset: int = 0
    """Byte offset of the storage inside the allocation."""
    staging: torch.UntypedStorage | None = None
    """A copy in shared memory that is refreshed at every push, for a storage that cannot be shared."""
    memory_is_alive: Callable[[], object] | None = None
    """CPU: the function returns a false value if the described memory was freed, even if its address was reused."""
    allocation_id: int = 0
    """CUDA: the driver's number of this allocation, unique in the life of the process. 0 if it is unknown."""

    def is_there(self) -> bool:
        """Return True if the memory that was described still lies at its address (on CUDA see `is_allocated`)."""
        return self.memory_is_alive is None or self.memory_is_alive() is not None

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return True if the storage still lies in the memory that was described."""
        there = self.data_ptr == storage.data_ptr() and self.nbytes == storage.nbytes()
        return there and self.is_there() and self.is_allocated()

    def is_freed(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def is_allocated(self) -> bool:
        """Return True if the CUDA memory is still in the described allocation.

        Regions with one `allocation_id` have one result.
        """
        return not self.allocation_id or allocation_id(self.data_ptr) == self.allocation_id

    @property
    def can_be_kept(self) -> bool:
        """True if this process can detect that the memory was freed. Then a server may keep it open."""
        return self.allocation.kind != "cuda" or self.allocation_id != 0

    def refresh(self, storage: torch.UntypedStorage) -> None:
        if self.staging is not None:
            self.staging.copy_(storage)


class Exports:
    """The regions of this process. Thread-safe. A forked child starts without regions."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Keyed by the StorageImpl's address, which the weak reference keeps from being used again.
        self._regions: dict[int, Region] = {}
        self._lock = threading.Lock()
        self._warned = False

    def regions(self, storages: Iterable[torch.UntypedStorage]) -> dict[int, Region]:
        """Return {`_cdata` of a storage: its region}. Export storages that are new, or that moved since their export.

        Raise WeightUpdateError if there is no shared memory left. Every storage then still has its values.
        """
        with self._lock:
            self._forget_freed()
            self._export([s for s in storages if not self._is_exported(s)])
            return {s._cdata: self._regions[s._cdata] for s in storages}

    def __len__(self) -> int:
        return len(self._regions)

    def _is_exported(self, storage: torch.UntypedStorage) -> bool:
        region = self._regions.get(storage._cdata)
        return region is not None and region.holds(storage)

    def _forget_freed(self) -> None:
        for key in [key for key, region in self._regions.items() if region.is_freed()]:
            del self._regions[key]

    def _export(self, storages: list[torch.UntypedStorage]) -> None:
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

    def _remember(self, storage: torch.UntypedStorage, allocation: Allocation, offset: int = 0) -> Region:
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        region = Region(weak, storage.device, storage.data_ptr(), storage.nbytes(), allocation, offset)
        self._regions[storage._cdata] = region
        return region

    def _move(self, storages: list[torch.UntypedStorage]) -> None:
        """Move storages into one arena, one after the other, so that at most one storage is in memory twice."""
        if not storages:
            return
        arena = Arena(sum(page_aligned(s.nbytes()) for s in storages))
        for storage in storages:
            reserved = arena.reserve(storage.nbytes())
            reserved.storage.copy_(storage)
            storage._swap_data_ptr_(reserved.storage)  # type: ignore[attr-defined]
            self._remember(storage, arena.describe(), reserved.offset).memory_is_alive = reserved.memory_is_alive

    def _stage(self, storage: torch.UntypedStorage) -> None:
        arena = Arena(storage.nbytes())
        reserved = arena.reserve(storage.nbytes())
        self._remember(storage, arena.describe(), reserved.offset).staging = reserved.storage

    def _export_cuda(self, storage: torch.UntypedStorage) -> None:
        try:
            allocation = _describe_cuda(storage)
        except RuntimeError as error:
            allocation, reason = None, str(error).splitlines()[0]
        else:
            reason = "its allocator uses expandable segments"
        if allocation is not None and allocation.handle[1:2] == _CUDA_MALLOC:
            self._remember(storage, allocation).allocation_id = allocation_id(storage.data_ptr())
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "CUDA memory could not be exported (%s); such weights travel through a copy in shared memory, "
                "which is much slower. Do not set expandable_segments for the trainer's allocator.",
                reason,
            )
        self._stage(storage)


def _describe_cuda(storage: torch.UntypedStorage) -> Allocation:
    """Export CUDA memory once, and decrement torch's count of importers, which this protocol does not use.

    torch keeps memory that the trainer frees until an importer decrements the count of the export. A server reads the
    memory only during an update, or while it is registered (see `registrations`), and the trainer keeps the memory
    during that time. So the count would only leak memory if a server dies.
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
    """Return the `_cdata` of the CPU storages whose memory must not move: page-locked, or not allocated by torch.

    The private mapping of a checkpoint file may move: a model from `from_pretrained` is in such mappings, and no other
    library has their addresses.
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
    """Return True if torch can exchange the memory of two storages, as torch 2.12 and later can."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def _describe_shared_by_torch(storage: torch.UntypedStorage) -> Allocation:
    """Describe a storage that torch shares (`share_memory_()`), or moves now because it cannot swap storages."""
    try:
        fd, nbytes = storage._share_fd_cpu_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise WeightUpdateError(f"Could not place {storage.nbytes():,} bytes into shared memory: {error}") from None
    return describe_fd(fd, nbytes, uuid.uuid4().hex)


def _check_dev_shm(nbytes: int) -> None:
    """Raise WeightUpdateError if /dev/shm lacks the memory.

    torch writes there without a reservation, so a full /dev/shm would be SIGBUS.
    """
    status = os.statvfs("/dev/shm")
    if status.f_bavail * status.f_frsize < nbytes:
        raise out_of_memory(OSError(28, "No space left in /dev/shm"), nbytes)


# -- what CUDA says about memory that torch allocated; without CUDA, nothing ------------------------------------------


def allocation_id(address: int) -> int:
    """Return the driver's number of the allocation at a device address, or 0 if the driver does not report it.

    Memory that was freed and allocated again at the same address has another number.
    """
    driver = _driver()
    if driver is None:
        return 0
    number = ctypes.c_uint64()
    failed = driver.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
    return 0 if failed else number.value


def device_frees(devices: Iterable[torch.device]) -> tuple[int, ...]:
    """Return how often torch's allocator returned memory of each device to the driver; empty if it does not count.

    While the number stays the same, memory of the allocator has not moved, and `allocation_id`s need no check.
    """
    counts = []
    for device in devices:
        if device.type == "cuda":
            count = torch.cuda.memory_stats_as_nested_dict(device).get("num_device_free")
            if count is None:
                return ()
            counts.append(count)
    return tuple(counts)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def wait_for_writes(devices: Iterable[torch.device]) -> None:
    """Return when all work that is queued on these devices, on any stream, is complete.

    If CUDA is in use, CPU tensors may be the target of copies from the current device. The function waits for this
    device, too.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    current = torch.device("cuda", torch.cuda.current_device())
    for device in {current if device.type == "cpu" else device for device in devices}:
        torch.cuda.synchronize(device)
