"""Work of a GPU that is still queued when a test goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch


def queue_late(stream: torch.cuda.Stream, write: Callable[[], object]) -> torch.cuda.Event:
    """Queue `write` on `stream` behind a kernel that waits, and return the event after it, which is not reached yet.

    A slow host may need longer to queue the work than the kernel waits. Then all is queued again, behind a longer wait.
    """
    for cycles in (400_000_000, 2_000_000_000, 8_000_000_000):  # 0.2 to 4 s at 2 GHz
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(cycles)
            write()
            written = stream.record_event()
        if not written.query():
            return written
    raise AssertionError("the work was done before this process could go on")
