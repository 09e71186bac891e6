"""These functions keep the owner's keys in this process's memory from the programs that it starts.

Runs of agents that are not isolated call `memory_hidden`, and the command line `take_from_environment`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


@contextlib.contextmanager
def memory_hidden() -> Iterator[None]:
    """Keep other processes of this user from reading this process's memory and environment (Linux)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "prctl"):
        yield
        return
    before = libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_DUMPABLE, before, 0, 0, 0)


def take_from_environment(name: str) -> str | None:
    """Remove a variable from `os.environ`, and overwrite its value where /proc/PID/environ shows it."""
    value = os.environ.get(name)
    if value is None:
        return None
    with contextlib.suppress(AttributeError, OSError):
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        address = getenv(name.encode())
        if address:
            ctypes.memset(address, ord("x"), len(os.fsencode(value)))
    del os.environ[name]
    return value
