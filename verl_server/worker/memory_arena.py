"""`MemoryArena`: memory that can be given back and taken again under tensors that stay where they are.

`ModelRunner` holds two, one for the weights and one for the KV pool. Their addresses never change, so views,
plans of weight updates and CUDA graphs made before a release are good after the resume.
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
"""Bytes at which tensors in an arena should start: what torch's CUDA allocator gives, and 16-byte loads need."""
_HUGE_PAGE = 2 * 2**20


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryArena:
    """`nbytes` (rounded up to whole pages) of a device, in one region of addresses; made present.

    Views keep the region alive; the last one to go gives back memory and addresses. Not thread-safe: one owner
    releases and resumes. Raises ServerUnavailableError, now or on `resume`, if the memory is not there.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._region = DeviceRegion(nbytes, device) if device.type == "cuda" else HostRegion(nbytes)
        self.nbytes = self._region.nbytes
        self.contents = self._region.tensor()
        """uint8 [nbytes]: all of it. Zeros at first on the CPU, undefined on CUDA."""
        self.is_present = True
        """Whether the contents may be used. On CUDA, using them while they are released is a fatal error."""
        self._kept = False
        self._host_copy: HostCopy | None = None

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor at byte `offset`, good for the arena's life. ValueError if it does not fit there."""
        nbytes = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + nbytes > self.nbytes:
            raise ValueError(f"{list(shape)} of {dtype} does not fit at byte {offset} of an arena of {self.nbytes}.")
        return self.contents[offset : offset + nbytes].view(dtype).view(*shape)

    @property
    def bytes_held(self) -> int:
        """Bytes of the device that the arena takes now."""
        return self.nbytes if self._region.is_mapped else 0

    def release(self, *, keep_contents: bool = False) -> None:
        """Give the memory back to the device or the system, after all work on it is done; no-op if released.

        With `keep_contents` the next `resume` brings the contents back: on CUDA from a copy in host memory. Host
        memory is where they are on the CPU, so there they stay, and nothing is given back.
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
        """Take memory at the same addresses; True if the contents are what they were. No-op (True) if present.

        Otherwise they are zeros on the CPU and undefined on CUDA. If memory is short (ServerUnavailableError) the
        arena stays released, contents that were kept stay kept, and `resume` may be called again.
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
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.is_mapped = True

    def map(self) -> None:
        """Nothing to do: pages come, zeroed, when they are first touched.

        To have them all come here would take longer: a copy into them brings them in with all its threads.
        """
        self.is_mapped = True

    def unmap(self) -> None:
        """Give all pages to the system. A touch before `map` is harmless: it reads zeros, and takes a page."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self.is_mapped = False

    def tensor(self) -> Tensor:
        """uint8 [nbytes] from the first huge page's start on; it keeps the mapping alive."""
        start = -torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=self.nbytes)


class HostCopy:
    """Host memory for one arena's contents, pinned if the system allows it.

    Kept from one release to the next: to pin it takes longer than to fill it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = HostRegion(nbytes).tensor()
        try:
            pin(self.tensor, device)
        except DriverError as error:
            logger.warning(
                "The weights' backup of %.2f GiB is not pinned, so copies are slow: %s", nbytes / 2**30, error
            )
        else:
            weakref.finalize(self, unpin, self.tensor, device).atexit = False
