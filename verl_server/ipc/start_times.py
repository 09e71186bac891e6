"""`StartTimes`: when each phase of a process's start ended, on the clock that all processes of a host share.

A scheduler process makes one, the modules that build a rank mark their phases, and the moments travel to the front
process in `scheduler_info["start"]`; `benchmarks.startup` prints them.
"""

from __future__ import annotations

import itertools
import time


class StartTimes:
    def __init__(self) -> None:
        self.moments = {"entered": time.monotonic()}
        """Phase -> the moment at which it ended, in seconds of `time.monotonic`, in the order of `mark` calls."""

    def mark(self, phase: str) -> None:
        """`phase` has just ended."""
        self.moments[phase] = time.monotonic()

    def __str__(self) -> str:
        """ "imports 2.1 s, ..., 3.2 s in all": the phases that follow each other in this process."""
        moments = list(self.moments.items())
        phases = [f"{name} {moment - before:.2f} s" for (_, before), (name, moment) in itertools.pairwise(moments)]
        return f"{', '.join(phases)}; {moments[-1][1] - moments[0][1]:.2f} s in all"
