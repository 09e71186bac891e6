"""Wait until one descriptor can be read or written, whatever its number is.

`select.select` refuses descriptors from 1,024 on, and a server with thousands of connections has such descriptors.
"""

from __future__ import annotations

import math
import select
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(what: int | HasFileno, seconds: float | None = None) -> bool:
    """Return True when `what` can be read or its peer has ended, False after `seconds`. None waits without a bound."""
    return _wait(what, select.POLLIN, seconds)


def wait_writable(what: int | HasFileno, seconds: float | None = None) -> bool:
    """Return True when `what` has room or its peer has ended, False after `seconds`. None waits without a bound."""
    return _wait(what, select.POLLOUT, seconds)


def _wait(what: int | HasFileno, event: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(what, event)
    return bool(poller.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000)))
