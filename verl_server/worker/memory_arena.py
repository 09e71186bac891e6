"""`MemoryArena`: memory that can be released and resumed under tensors whose addresses never change.

`ModelRunner` has one for the weights and `KVCache` one for the pool. Views, plans of weight updates and CUDA graphs
from before a release are still valid after the resume.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_server.errors import ServerUnavailableError
from verl_server.worker.cuda_memory import DeviceRegion, DriverError, pin, unpin

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Alignment in bytes of tensors in an arena, as in torch's CUDA allocator. 16-byte loads need at least 16."""
_HUGE_PAGE = 2 * 2**20


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryArena:
    """`nbytes` (rounded up to whole pages) of a device at fixed addresses, present at first.

    Views keep the region alive. Memory and addresses are freed with the last view. Not thread-safe: one owner releases
    and resumes. The constructor and `resume` raise ServerUnavailableError if the device has too little memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._region: DeviceRegion | HostRegion | MetaRegion
        if device.type == "cuda":
            self._region = DeviceRegion(nbytes, device)
        else:
            self._region = HostRegion(nbytes) if device.type == "cpu" else MetaRegion(nbytes)
        self.nbytes = self._region.nbytes
        self.contents = self._region.tensor()
        """The whole memory as uint8 [nbytes]. At first zeros on the CPU, undefined on CUDA."""
        self.is_present = True
        """True while the contents may be used. On CUDA, a use of released memory is a fatal error."""
        self._kept = False
        self._host_copy: HostCopy | None = None

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor at byte `offset`. Raise ValueError if it does not fit into the arena."""
        nbytes = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + nbytes > self.nbytes:
            raise ValueError(f"{list(shape)} of {dtype} does not fit at byte {offset} of an arena of {self.nbytes}.")
        return self.contents[offset : offset + nbytes].view(dtype).view(*shape)

    @property
    def bytes_held(self) -> int:
        """Bytes of the device that the arena takes now, 0 while released."""
        return self.nbytes if self._region.is_mapped else 0

    def release(self, *, keep_contents: bool = False) -> None:
        """Free the memory after all work on it has finished. Does nothing if it is already released.

        With `keep_contents` the next `resume` restores the contents: on CUDA from a copy in host memory. On the CPU the
        contents are in host memory already, so they stay there and nothing is freed.
        """
        if not self.is_present:
            return
        if self.device.type == "cuda" and keep_contents:
            self._host_copy = self._host_copy or HostCopy(self.nbytes, self.device)
            self._host_copy.tensor.copy_(self.contents)
        if self.device.type == "cuda" or not keep_contents:
            self._region.unmap()
        self.is_present, self._kept = False, keep_contents

    def resume(self) -> bool:
        """Map memory at the same addresses again. Return True if the contents are unchanged since the release.

        Otherwise the contents are zeros on the CPU and undefined on CUDA. Return True if the memory is present. Raise
        ServerUnavailableError if memory is short; the arena then stays released with the contents that were kept, and
        `resume` may be called again.
        """
        if self.is_present:
            return True
        if not self._region.is_mapped:
            self._region.map()
        if self._kept and self._host_copy is not None:
            self.contents.copy_(self._host_copy.tensor)
        self.is_present = True
        return self._kept


class HostRegion:
    """Private anonymous memory of this process, in huge pages where the system has them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            self._map = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ServerUnavailableError(
                f"The system refused {self.nbytes / 2**30:.2f} GiB for the weights or the KV cache ({error}). "
                "Free memory, or start the server with a smaller kv_cache_gib."
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.is_mapped = True

    def map(self) -> None:
        """Mark the region as mapped. The system provides zeroed pages at their first write.

        The threads of a later copy write the pages in less time than this method would need.
        """
        self.is_mapped = True

    def unmap(self) -> None:
        """Free all pages. An access before `map` does no harm: it reads zeros, and allocates a page."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self.is_mapped = False

    def tensor(self) -> Tensor:
        """Return uint8 [nbytes], aligned to a huge page. The tensor keeps the mapping alive."""
        start = -torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=self.nbytes)


class MetaRegion:
    """A region without memory, for a model on the device "meta" (`compile_jobs`)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_mapped = True

    def map(self) -> None: ...

    def unmap(self) -> None: ...

    def tensor(self) -> Tensor:
        """Return uint8 [nbytes] on the device "meta"."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device="meta")


class HostCopy:
    """Host memory for the contents of one arena, pinned if the system allows it.

    The arena keeps it from one release to the next, because pinning takes longer than copying.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = HostRegion(nbytes).tensor()
        try:
            pin(self.tensor, device)
        except DriverError as error:
            logger.warning(
                "The backup of the weights (%.2f GiB) cannot be pinned, so copies are slow: %s", nbytes / 2**30, error
            )
        else:
            weakref.finalize(self, unpin, self.tensor, device).atexit = False
