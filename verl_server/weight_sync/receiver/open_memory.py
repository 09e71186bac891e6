"""Opens trainers' memory in a server process: maps shared memory read-only, and opens CUDA allocations through IPC.

A `Region` is one opened allocation. Each reader holds a reference to the region, and the region closes with the last
reference. So plans share regions, and a running copy keeps its memory even if its plan is dropped. Received sizes and
offsets are always checked: a view beyond its allocation would read foreign memory, or crash.

Shared memory is mapped only if it is sealed against shrinking. Other shared memory is copied with `pread`
(`memory_file`). A view whose elements lie so far apart that its pages take far more memory than the elements is copied,
too.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import stat
import threading
import warnings
import weakref

import torch
from torch import Tensor

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation, TensorHandle
from verl_server.weight_sync.receiver.memory_file import FileView, MemoryFile, elements_spanned, is_scattered, is_spread
from verl_server.weight_sync.shm_file import open_shm_file

FLOATING = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ARENA_NAME = "/memfd:verl-"
"""Prefix of the file name of an `Arena` in /proc. The arena's id follows the prefix."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14."""
_IPC_HANDLE = 64
"""Bytes of a cudaIpcMemHandle_t. torch puts a version and a type in front."""


class Region:
    """One opened allocation. Its memory stays open while this object, or a tensor on the memory, exists."""

    def __init__(self, allocation: Allocation, data: Tensor | None, file: MemoryFile | None = None) -> None:
        self.allocation = allocation
        self.data = data
        """The whole memory as bytes, or None if the memory must be read from the file."""
        self.file = file
        """The file of shared memory, or None for memory on a GPU."""


class OpenAllocations:
    """The regions that are open in this process. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._regions: weakref.WeakValueDictionary[Allocation, Region] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._regions)

    def open(self, allocation: Allocation) -> Region:
        """Return the region of an allocation, and open it if it is closed.

        Raise WeightUpdateError if the memory does not match its description.
        """
        with self._lock:
            region = self._regions.get(allocation)
            if region is None:
                region = self._regions[allocation] = self._opened(allocation)
            return region

    def hold(self) -> HeldMemory:
        """Return an empty `HeldMemory`, which opens a region when a tensor in it is read for the first time."""
        return HeldMemory(self)

    def view(self, name: str, handle: TensorHandle) -> Tensor:
        """Return a described tensor. Only this tensor keeps its memory open."""
        return self.hold().view(name, handle)

    def _opened(self, allocation: Allocation) -> Region:
        match allocation.kind:
            case "shm":
                return _open_shared(allocation)
            case "shm_name":
                fd, path = open_shm_file(allocation)
                return Region(allocation, None, MemoryFile(fd, path, allocation.storage_offset_bytes))
            case "cuda":
                return Region(allocation, _open_cuda(allocation, self._device))


class HeldMemory:
    """The regions that one plan reads, and its copies of views that cannot be mapped."""

    def __init__(self, memory: OpenAllocations) -> None:
        self._memory = memory
        self._regions: dict[Allocation, Region] = {}
        self._copies: dict[tuple[object, ...], tuple[str, FileView]] = {}
        """(name of the tensor, copy) of each view that was read from a file."""

    def __contains__(self, allocation: Allocation) -> bool:
        return allocation in self._regions

    @property
    def owners(self) -> list[int]:
        """Processes that own the memory. If one of them ends, the memory is no longer the trainer's weights."""
        return sorted({allocation.pid for allocation in self._regions})

    @property
    def scattered(self) -> str:
        """Name of a tensor that must be read row by row, which is slow. Empty if there is none."""
        return next((name for name, copy in self._copies.values() if copy.is_scattered), "")

    def view(self, name: str, handle: TensorHandle) -> Tensor:
        """Return the described tensor, as a view into its owner's memory or as a copy of the present values.

        Raise WeightUpdateError, which names the tensor.
        """
        try:
            dtype = check_view(handle)
            if math.prod(handle.shape) == 0:
                return torch.empty(handle.shape, dtype=dtype)
            region = self._regions.get(handle.allocation)
            if region is None:
                region = self._regions[handle.allocation] = self._memory.open(handle.allocation)
            data = region.data
            if region.file is not None and (data is None or is_scattered(handle.shape, handle.stride, dtype.itemsize)):
                return self._copied(name, handle, region.file, dtype)
            assert data is not None
            if data.data_ptr() % dtype.itemsize:
                raise WeightUpdateError(f"its memory is not aligned to {dtype.itemsize} bytes.")
            usable = data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            return usable.as_strided(handle.shape, handle.stride, handle.storage_offset)
        except WeightUpdateError as error:
            raise WeightUpdateError(f"'{name}': {error}") from None
        except (RuntimeError, TypeError, OverflowError) as error:  # dimensions beyond what a tensor can have
            message = str(error).splitlines()[0]
            raise WeightUpdateError(f"'{name}': its shape and stride do not describe a tensor ({message}).") from None

    def read_again(self) -> None:
        """Copy the present values of all views that are not mapped.

        Raise WeightUpdateError, with the tensor's name, if a file was cut off.
        """
        for name, copy in self._copies.values():
            try:
                copy.read()
            except WeightUpdateError as error:
                raise WeightUpdateError(f"'{name}': {error}") from None

    def clear(self) -> None:
        self._regions, self._copies = {}, {}

    def _copied(self, name: str, handle: TensorHandle, file: MemoryFile, dtype: torch.dtype) -> Tensor:
        shape, stride, offset = tuple(handle.shape), tuple(handle.stride), handle.storage_offset
        key = (handle.allocation, dtype, shape, stride, offset)
        if key not in self._copies:
            copy = FileView(file, dtype, shape, stride, offset)
            copy.read()
            self._copies[key] = name, copy
        return self._copies[key][1].data


def check_view(handle: TensorHandle) -> torch.dtype:
    """Raise WeightUpdateError unless the view lies inside its allocation. Return its dtype."""
    dtype = FLOATING.get(handle.dtype)
    if dtype is None:
        raise WeightUpdateError(
            f"dtype {handle.dtype[:40]} is not among {', '.join(FLOATING)}; weights are floating point."
        )
    shape, stride, offset = handle.shape, handle.stride, handle.storage_offset
    if len(shape) != len(stride) or min([*shape, *stride, offset], default=0) < 0:
        raise WeightUpdateError(f"shape {shape}, stride {stride} and offset {offset} do not describe a tensor.")
    end = offset + elements_spanned(shape, stride)
    if math.prod(shape) and end * dtype.itemsize > handle.allocation.nbytes:
        raise WeightUpdateError(
            f"shape {shape} with stride {stride} from offset {offset} needs {end * dtype.itemsize:,} bytes, but its "
            f"allocation has {handle.allocation.nbytes:,}."
        )
    return dtype


def fault_in(tensors: list[Tensor]) -> None:
    """Populate the page table for CPU tensors, so that a copy does not fault on each page.

    Only pages of the tensors are populated. In the rest of an arena, where tensors were freed, this would allocate new
    pages.
    """
    page = mmap.PAGESIZE
    spans = []
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() and not is_spread(tensor.shape, tensor.stride()):
            start = tensor.data_ptr()
            extent = elements_spanned(tensor.shape, tensor.stride())
            spans.append((start // page * page, -(-(start + extent * tensor.element_size()) // page) * page))
    libc = ctypes.CDLL(None)
    end = 0
    for start, stop in sorted(spans):
        start = max(start, end)
        if start < stop:  # an old kernel refuses: then the copy faults
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _POPULATE_READ)
            end = stop


# -- shared memory -------------------------------------------------------------------------------------------------


def _open_shared(allocation: Allocation) -> Region:
    path = f"/proc/{allocation.pid}/fd/{allocation.fd}"
    try:
        # O_NONBLOCK: the number may name a pipe by now, and opening one would wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise WeightUpdateError(
            f"Cannot open the trainer's shared memory {path}: {error.strerror}. Is the trainer process "
            f"{allocation.pid} alive, on this host, run by the same user, and in the same PID namespace (container) "
            "as the server?"
        ) from None
    file = MemoryFile(fd, path)
    if not _check_shared(fd, path, allocation):
        return Region(allocation, None, file)
    try:
        mapping = mmap.mmap(fd, allocation.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise WeightUpdateError(f"Cannot map {allocation.nbytes:,} bytes of {path}: {error}.") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "the given buffer is not writable": it is only read
        data = torch.frombuffer(mapping, dtype=torch.uint8)
    return Region(allocation, data, file)


def _check_shared(fd: int, path: str, allocation: Allocation) -> bool:
    """Return True if the file can be mapped safely. Raise WeightUpdateError if it is not the file that was described.

    A pid or descriptor may have been reused, or belong to another process in another PID namespace. An ordinary file is
    refused. The inodes of memfds are small counters, so the name of an arena's file contains the arena's id, too.
    """
    seals = _seals(fd)  # before the size: the owner may shrink the file and then seal it
    status, target = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
    another_arena = target.startswith(_ARENA_NAME) and target.split()[0] != _ARENA_NAME + allocation.id
    if seals is None or another_arena or status.st_ino != allocation.inode:
        raise WeightUpdateError(
            f"{path} is {target}, not the memory that was described. The trainer freed it before the update was "
            "answered, or runs in another PID namespace (container) than the server."
        )
    if status.st_size < allocation.nbytes:
        raise WeightUpdateError(f"{path} holds {status.st_size:,} bytes, but {allocation.nbytes:,} were described.")
    # Huge pages have holes for which none may be left: reading such a mapping is SIGBUS, too.
    return bool(seals & fcntl.F_SEAL_SHRINK) and status.st_blksize == mmap.PAGESIZE


def _seals(fd: int) -> int | None:
    """Return the seals of a memfd or of a file in /dev/shm, or None for any other file."""
    try:
        return int(fcntl.fcntl(fd, fcntl.F_GET_SEALS)) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None


# -- CUDA ----------------------------------------------------------------------------------------------------------


def _open_cuda(allocation: Allocation, device: torch.device) -> Tensor:
    """Open CUDA memory, even a peer's, while the local device is current.

    Otherwise CUDA would create a context on the peer's GPU.
    """
    if device.type != "cuda":
        raise WeightUpdateError("This server runs on the CPU and cannot read GPU memory. Push CPU tensors.")
    _check_handle(allocation)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    # A pickle of torch names a counter of importers, which closing decrements. Our sender needs none.
    counter = allocation.ref_counter_handle or b"/verl_no_counter"
    with torch.cuda.device(device):  # the current device of this thread may be another
        try:
            storage = torch.UntypedStorage._new_shared_cuda(  # type: ignore[no-untyped-call]
                torch.cuda.current_device(),
                allocation.handle,
                allocation.nbytes,
                allocation.storage_offset_bytes,
                counter,
                allocation.ref_counter_offset,
                allocation.event_handle,
                allocation.event_sync_required,
            )
        except (RuntimeError, TypeError, OverflowError) as error:
            raise WeightUpdateError(
                f"Cannot open GPU memory of process {allocation.pid} on {allocation.device_uuid}: "
                f"{str(error).splitlines()[0]}. Is that process alive, on this host, another process than the server, "
                "its GPU the server's or a peer of it, and its allocator without expandable_segments? Push from GPUs "
                "without peer access, such as several GeForce cards, through a process group or as CPU tensors."
            ) from None
        if allocation.event_sync_required:  # opening made this thread's stream wait for the writer; others read too
            torch.cuda.current_stream().synchronize()
        data = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (allocation.nbytes,), (1,))
        room = _room_behind(data.data_ptr() - allocation.storage_offset_bytes) - allocation.storage_offset_bytes
    if room < allocation.nbytes:
        raise WeightUpdateError(
            f"The GPU memory of process {allocation.pid} has {max(0, room):,} bytes from where "
            f"{allocation.nbytes:,} were described."
        )
    return data


def _check_handle(allocation: Allocation) -> None:
    """Accept only handles of memory from cudaMalloc. torch parses other kinds without a check, and may crash."""
    handle = allocation.handle
    if len(handle) >= 2 and len(handle) != _IPC_HANDLE and handle[1:2] == b"e":
        raise WeightUpdateError(
            f"The GPU memory of process {allocation.pid} lies in an expandable segment, which cannot be shared: do not "
            "set expandable_segments for the trainer's allocator."
        )
    if len(handle) != _IPC_HANDLE and (len(handle) != _IPC_HANDLE + 2 or handle[1:2] != b"c"):
        raise WeightUpdateError(
            f"Cannot open GPU memory of process {allocation.pid}: {len(handle)} bytes are no handle."
        )
    if not 0 <= allocation.storage_offset_bytes < 1 << 62 or not 0 < allocation.nbytes < 1 << 62:
        raise WeightUpdateError(f"The GPU memory of process {allocation.pid} has an impossible size or offset.")


def _room_behind(address: int) -> int:
    """Return the bytes from an address to the end of its opened segment, or 0 if the driver does not report them."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
    return 0 if failed else start.value + size.value - address
