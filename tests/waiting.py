"""Bounded waits for what sends no message, such as the state of a server that is read over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(holds: Callable[[], object], seconds: float = 10.0) -> bool:
    """Return True when `holds()` is true, and False if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
