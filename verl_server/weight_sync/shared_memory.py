"""Shared memory on the CPU: regions that a trainer process owns, and that schedulers map.

`exports` moves tensor storages into an `Arena`. An arena is one memfd for all storages that are exported together, so a
model takes two file descriptors, and not two for each tensor. `open_memory` maps the memfd read-only through
/proc/PID/fd/FD. A memfd is sealed against shrinking, because a read of a truncated mapping is SIGBUS. The pages of a
memfd are reserved before they are written, because a mapping that runs out of memory is SIGBUS, too. A memfd has no
name in /dev/shm, so no file is left when its processes die.
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
    """Return the error for a failed reservation. The message has the requested bytes and the remedy."""
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
    """Weak reference to the memory: returns None after the memory was freed, whichever storage owned the memory last.
    """


class Arena:
    """One memfd of a fixed size, from which regions are allocated in order.

    Each region is a storage that keeps the mapping alive. When the last region is freed, the memory returns to the
    system and the file descriptor closes. The arena object itself need not be kept.
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
        """Return the next `nbytes` bytes, page-aligned. Their memory is reserved."""
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
    """Return the pages of a freed region to the system, while other regions of the arena exist.

    A forked child inherits this finalizer, but must not run it: the pages are the parent's weights.
    """
    alive = mapping()
    if alive is not None and os.getpid() == owner:
        with contextlib.suppress(OSError):
            alive.madvise(mmap.MADV_REMOVE, offset, page_aligned(nbytes))
