"""Shared memory on CPU: regions that a trainer process owns and schedulers map.

`exports` moves tensor storages into an `Arena` (one memfd for all storages that are exported together, so a model
costs two file descriptors, not two for each tensor); `open_memory` maps it read-only through /proc/PID/fd/FD.
A memfd is sealed against shrinking, for reading a truncated mapping is SIGBUS, and its pages are reserved
before they are written, for running out of memory in a mapping is SIGBUS too. It has no name in /dev/shm, so
nothing is left behind when its processes die.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import uuid
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation

_REMEDIES = {
    errno.ENOSPC: "No shared memory is left on this host or in this container: free some, or raise its memory limit.",
    errno.ENOMEM: "No memory is left on this host or in this container: free some, or raise its memory limit.",
    errno.EFBIG: "This process may not create a file that large: raise its limit (`ulimit -f unlimited`).",
    errno.EMFILE: "This process has too many open files: raise its limit (`ulimit -n 65536`).",
    errno.ENFILE: "This host has too many open files: raise fs.file-max.",
}


def out_of_memory(error: OSError, nbytes: int) -> WeightUpdateError:
    """Return the error for a failed reservation, with the bytes wanted and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return WeightUpdateError(
        f"Could not place {nbytes:,} bytes of weights into shared memory ({error.strerror}). {remedy} "
        "The tensors are unchanged."
    )


class Reserved(NamedTuple):
    """A region that was cut from an arena."""

    offset: int
    """Bytes from the start of the arena."""
    storage: torch.UntypedStorage
    memory_is_alive: Callable[[], object | None]
    """Returns None once this memory was freed, whichever storage owned it last."""


class Arena:
    """One memfd of a fixed size from which regions are cut in order.

    Each region is a storage that keeps the mapping alive; the memory goes back to the system, and the file
    descriptor is closed, when the last of them is freed. Nobody needs to hold the arena itself.
    """

    def __init__(self, nbytes: int) -> None:
        self.id = uuid.uuid4().hex
        self.nbytes = nbytes
        self.fd = -1
        self._end = 0
        try:
            # The reader looks for the id in the name: inodes of memfds are small numbers that two processes may share.
            self.fd = os.memfd_create(f"verl-{self.id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise out_of_memory(error, nbytes) from None
        weakref.finalize(self._map, os.close, self.fd).atexit = False

    def reserve(self, nbytes: int) -> Reserved:
        """Return the next `nbytes`, page-aligned, backed by memory that is really there."""
        offset = self._end
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            raise out_of_memory(error, nbytes) from None
        self._end = offset + page_aligned(nbytes)
        # The storage owns this view, wherever its memory may be swapped to: it dies exactly when the memory does.
        view = memoryview(self._map)[offset : offset + nbytes]
        owner = os.getpid()
        weakref.finalize(view, _return_pages, owner, weakref.ref(self._map), offset, nbytes).atexit = False
        return Reserved(offset, torch.frombuffer(view, dtype=torch.uint8).untyped_storage(), weakref.ref(view))

    def describe(self) -> Allocation:
        return describe_fd(self.fd, self.nbytes, self.id)


def describe_fd(fd: int, nbytes: int, id: str) -> Allocation:
    return Allocation(id=id, kind="shm", nbytes=nbytes, pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)


def page_aligned(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _return_pages(owner: int, mapping: weakref.ref[mmap.mmap], offset: int, nbytes: int) -> None:
    """Give the pages of a freed region back while other regions of the arena live on.

    Never in a forked child: it inherits this finalizer, but the pages are the parent's weights.
    """
    alive = mapping()
    if alive is not None and os.getpid() == owner:
        with contextlib.suppress(OSError):
            alive.madvise(mmap.MADV_REMOVE, offset, page_aligned(nbytes))
