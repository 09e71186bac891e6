"""CPU tensors in torch's `file_system` strategy: files in /dev/shm that SGLang's older payloads name.

The receiver opens such a file for handles that `sglang/payloads` parsed. The receiver copies the file and does not map
it: another process may cut the file off at any time. A read of a mapping would then be SIGBUS, while a copy is only a
short read.

The file has a reference count (int32, padded to 64 bytes), and then the storage. The owner holds one reference, and
adds one reference for each pickle of the storage. The reader of a pickle releases that reference. The last release
removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation

_NAME = re.compile(r"torch_\d{1,20}_\d{1,20}_\d{1,20}")
"""Pattern of the names of torch's files. Other shared memory of this user is refused."""
_LOCK_SECONDS = 5.0
_COUNT = struct.Struct("=i")


def open_shm_file(allocation: Allocation) -> tuple[int, str]:
    """Open the file, release its reference, and return (descriptor, path). The open file stays complete.

    The caller closes the descriptor. Raise WeightUpdateError if the file does not match its description.
    """
    with _opened(allocation) as (fd, path):
        _count_down(fd)
        return os.dup(fd), path


def give_back_reference(allocation: Allocation) -> None:
    """Release the reference without reading the file."""
    with _opened(allocation) as (fd, _):
        _count_down(fd)


@contextlib.contextmanager
def _opened(allocation: Allocation) -> Iterator[tuple[int, str]]:
    """Return (descriptor, path) of a file of torch that belongs to this user and is large enough."""
    if _NAME.fullmatch(allocation.name) is None:
        raise WeightUpdateError(f"'{allocation.name[:100]}' is not a shared-memory file of torch's.")
    path = f"/dev/shm/{allocation.name}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise WeightUpdateError(
            f"Cannot open {path}: {error.strerror}. Is the process that made it alive, on this host, run by the same "
            "user, with the same /dev/shm (in a container: --ipc=host), and did it keep the tensor until the reply?"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise WeightUpdateError(f"{path} is not a file of this server's user.")
        if status.st_size < allocation.storage_offset_bytes + allocation.nbytes:
            raise WeightUpdateError(f"{path} has {status.st_size:,} bytes, too few for {allocation.nbytes:,}.")
        yield fd, path
    except OSError as error:
        raise WeightUpdateError(f"Cannot read {path}: {error.strerror}.") from None
    finally:
        os.close(fd)


def read_exactly(fd: int, buffer: memoryview, offset: int, path: str) -> None:
    """Fill `buffer` from `offset` of a file on. Raise WeightUpdateError if the file ends too early.

    OSErrors pass through.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise WeightUpdateError(f"{path} was cut off while it was read, at byte {offset + done:,}.")
        done += count


def _lock(fd: int) -> None:
    """Lock the file. Raise WeightUpdateError if another process keeps the lock for `_LOCK_SECONDS`.

    The other ranks of an update hold the lock for microseconds.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"Another process has kept the lock of the shared memory for {_LOCK_SECONDS:g} s."
                ) from None
            time.sleep(0.001)


def _count_down(fd: int) -> None:
    """Decrement the reference count, but never release the owner's own reference: several ranks may have one payload.

    The ranks exclude each other by a lock. The owner changes the count without a lock, but not while it waits for the
    reply.
    """
    _lock(fd)
    try:
        (count,) = _COUNT.unpack(os.pread(fd, _COUNT.size, 0))
        if count > 1:
            os.pwrite(fd, _COUNT.pack(count - 1), 0)
    finally:
        # A duplicate of the descriptor outlives this call, and would keep the lock. The other ranks wait for it.
        fcntl.flock(fd, fcntl.LOCK_UN)
