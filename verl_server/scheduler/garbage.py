"""`Garbage`: runs the full garbage collections of rank 0's process in idle time.

A full collection visits every page of the prefix cache: 0.1 s for 65,000 pages, in which no step begins. Python starts
one whenever the objects have grown by a quarter. Young objects are collected as usual.
"""

from __future__ import annotations

import gc

_NEVER = 1 << 30
"""Collections of the middle generation before Python starts a full one."""
_ENOUGH = 100
"""Collections of the middle generation after which a full one is worth its time: some 700,000 new objects."""


class Garbage:
    """Owned by the `SchedulerLoop`."""

    def defer(self) -> None:
        """Let Python start no full collection."""
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)

    @property
    def is_due(self) -> bool:
        return gc.get_count()[2] >= _ENOUGH

    def collect(self) -> None:
        gc.collect()
