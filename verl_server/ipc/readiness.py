"""Wait until one descriptor can be read or written, whatever its number is.

`select.select` refuses descriptors from 1,024 on, and a server with thousands of connections has such descriptors.

A message that comes within a millisecond or so is better awaited without sleep: waking a thread on an idle CPU takes
some ten microseconds, and more in a virtual machine. A weight push has a dozen such messages. `spin` polls without
sleep, where there are CPUs enough that this takes none from the process that is awaited. The environment variable
VERL_SERVER_SPIN=0 turns it off.
"""

from __future__ import annotations

import functools
import math
import os
import select
import time
from typing import Protocol

_SPIN_CPUS = 8
"""Fewest CPUs of a process that polls without sleep."""


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(what: int | HasFileno, seconds: float | None = None) -> bool:
    """True when `what` can be read or its peer is gone; False after `seconds`. None waits as long as it takes."""
    return _wait(what, select.POLLIN, seconds)


def wait_writable(what: int | HasFileno, seconds: float | None = None) -> bool:
    """True when `what` has room or its peer is gone; False after `seconds`. None waits as long as it takes."""
    return _wait(what, select.POLLOUT, seconds)


def _wait(what: int | HasFileno, event: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(what, event)
    return bool(poller.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000)))


def spin(poller: select.poll, seconds: float) -> list[tuple[int, int]]:
    """The events of `poller`, polled without sleep; empty after `seconds`, and at once where no process may spin."""
    if not may_spin():
        return []
    end = time.monotonic() + seconds
    while not (events := poller.poll(0)) and time.monotonic() < end:
        pass
    return events


def spin_until_readable(what: int | HasFileno, seconds: float) -> None:
    """Return when `what` can be read or its peer is gone, or after `seconds`; see `spin`."""
    if seconds > 0 and may_spin():
        poller = select.poll()
        poller.register(what, select.POLLIN)
        spin(poller, seconds)


@functools.cache
def may_spin() -> bool:
    return len(os.sched_getaffinity(0)) >= _SPIN_CPUS and os.environ.get("VERL_SERVER_SPIN") != "0"
