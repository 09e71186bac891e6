"""`ProgramLoad`: whether a program computes, so that a long build is not taken for an idle episode.

`agents/episode.py` asks only after a long silence, because an answer reads all of /proc.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from verl_server.rollout.launched import launcher_of

_BUSY = 0.1
"""Cores. A program that merely waits uses less."""


class ProgramLoad:
    """The load of the program that writes `log`, and of its descendants, between two calls."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._last: tuple[float, float] | None = None  # (time, CPU time)

    def is_busy(self) -> bool:
        """Return True if the program has used a tenth of a core or more since the last call. False if none runs."""
        launcher = launcher_of(self._log)
        now, used = time.monotonic(), 0.0 if launcher is None else _cpu_seconds(launcher)
        last, self._last = self._last, (now, used)
        return last is not None and used - last[1] > _BUSY * (now - last[0])


def _cpu_seconds(root: int) -> float:
    """Return the CPU time of a process and of its descendants (Linux). That of an ended process counts if collected."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            values = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(values[1])
            ticks[int(folder.name)] = sum(map(int, values[11:15]))  # its own, and that of its collected children
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return sum(ticks.get(pid, 0) for pid in found) / os.sysconf("SC_CLK_TCK")
