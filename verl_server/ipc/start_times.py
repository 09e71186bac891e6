"""`StartTimes`: the time at which each phase of a process's start ended.

The clock is the same in all processes of a host. A scheduler process creates one `StartTimes`, and the modules that
build a rank mark the ends of their phases. `scheduler_info["start"]` has the times for the front process, and
`benchmarks.startup` prints them.
"""

from __future__ import annotations

import itertools
import time


class StartTimes:
    def __init__(self) -> None:
        self.moments = {"entered": time.monotonic()}
        """Phase -> time at which it ended, in seconds of `time.monotonic`, in the order of the calls of `mark`."""

    def mark(self, phase: str) -> None:
        """Record that `phase` ends now."""
        self.moments[phase] = time.monotonic()

    def __str__(self) -> str:
        """Return the duration of each phase and of all: "imports 2.10 s, ...; 3.20 s in all"."""
        moments = list(self.moments.items())
        phases = [f"{name} {moment - before:.2f} s" for (_, before), (name, moment) in itertools.pairwise(moments)]
        return f"{', '.join(phases)}; {moments[-1][1] - moments[0][1]:.2f} s in all"
