"""`Garbage`: runs the full garbage collections of rank 0's process in idle time.

A full collection visits every page of the prefix cache. With 65,000 pages it takes 0.1 s, during which no step begins.
Python starts a full collection whenever the number of objects has grown by a quarter. Young objects are collected as
usual.
"""

from __future__ import annotations

import gc

_NEVER = 1 << 30
"""Number of collections of the middle generation before Python starts a full collection."""
_ENOUGH = 100
"""Number of collections of the middle generation after which a full collection runs: some 700,000 new objects."""


class Garbage:
    """Full garbage collections in idle time. The `SchedulerLoop` owns it."""

    def defer(self) -> None:
        """Keep Python from starting full collections."""
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)

    @property
    def is_due(self) -> bool:
        return gc.get_count()[2] >= _ENOUGH

    def collect(self) -> None:
        gc.collect()
