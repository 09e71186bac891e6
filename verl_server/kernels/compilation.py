"""Compilation of Triton kernels: only one process at a time compiles a kernel of a cache folder.

Each process that uses Triton calls `share`, which also counts the kernels that the process compiles. Ranks, servers
that start together and the processes of `compile_ahead` then do not compile the same kernel side by side: the first
process compiles it, the others wait and load it from the cache.
The lock of a kernel is a byte of one file in the cache folder, which the system unlocks when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST_SECONDS = 60.0
"""Most seconds to wait for another process that compiles a kernel."""

_state: _Shared | None = None


def cache_folder() -> Path:
    """Return Triton's cache folder: TRITON_CACHE_DIR, else .triton/cache in TRITON_HOME or in the user's home."""
    if given := os.environ.get("TRITON_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def share() -> None:
    """Make this process wait while another process compiles the same kernel. Count the compilations of this process."""
    global _state
    from triton import knobs

    _state = _state or _Shared()
    knobs.runtime.jit_cache_hook = _state.before
    knobs.runtime.jit_post_compile_hook = _state.after
    knobs.compilation.listener = _state.count


def num_compiled() -> int:
    """Return the number of kernels that this process compiled since `share`, because the cache lacked them."""
    return 0 if _state is None else _state.num_compiled


def _lock(file: int, byte: int) -> None:
    """Lock a byte of the file. After `_MOST_SECONDS`, return without the lock: the process that has it may hang."""
    end = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < end:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return
        except BlockingIOError:
            time.sleep(0.005)


class _Shared:
    """Triton's hooks around a compilation."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self._owner, self._file = -1, -1

    def before(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Lock the kernel. Return False, so that the compilation continues."""
        with contextlib.suppress(OSError):  # a cache that cannot be written, or locked: no other process can use it
            file = self._lock_file()
            fcntl.lockf(file, fcntl.LOCK_UN)  # a compilation that failed has no end
            digest = hashlib.sha256(f"{fn.module}.{fn.name}:{key}".encode()).digest()
            _lock(file, int.from_bytes(digest[:7], "big"))
        return False

    def after(self, **_: Any) -> None:
        """Unlock the kernel, which is in the cache now."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._lock_file(), fcntl.LOCK_UN)

    def count(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.num_compiled += 1
            logger.debug("Compiled %s in %.2f s", src.name, times.total / 1e6)

    def _lock_file(self) -> int:
        if self._owner != os.getpid():  # a fork shares the file of its parent, but must have locks of its own
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "verl-server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._owner = os.getpid()
        return self._file
