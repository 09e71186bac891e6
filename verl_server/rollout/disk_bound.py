"""`launch_within`: runs a program, and ends it if its folders take too much of the disk.

The kernel bounds the size of one file (RLIMIT_FSIZE), not that of all files. So the folders are measured while the
program runs. `ProgramPlace` calls it for agents, and `WorkspaceEnvironment` for checks, which run the agent's code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from verl_server.rollout.launched import Exit, Program, launch, tail

_PERIOD = 2.0
"""Seconds between two measurements."""
_LARGEST_SHARE = 0.05
"""Share of the time for measurements: those of many files take longer, and are made less often."""
_MOST_ENTRIES = 1_000_000
"""Files and folders of a program. A disk has a number of files that it can hold, too."""
_BLOCK = 512
"""Bytes of the unit of `st_blocks`, whatever the blocks of the disk are."""


async def launch_within(program: Program, folders: Sequence[Path], most: int, bound: str) -> Exit:
    """Run a program to its end, or until `folders` take more than `most` bytes of the disk, or a million entries.

    Then the program and its descendants are ended, and `exceeded` of the result says so, with `bound`, the name of the
    setting. A program that writes fast exceeds the bound before it is measured. A cancelled call ends all first.
    """
    launching = asyncio.ensure_future(launch(program))
    measuring = asyncio.ensure_future(_excess(folders, most))
    try:
        await asyncio.wait([launching, measuring], return_when=asyncio.FIRST_COMPLETED)
        if launching.done():
            return launching.result()
        excess = measuring.result()
    finally:
        measuring.cancel()
        launching.cancel()
        await asyncio.gather(launching, measuring, return_exceptions=True)
    exceeded = f"The files of the program take more than {excess} ({bound})."
    output = await asyncio.to_thread(tail, program.log)
    return Exit(-signal.SIGKILL, output, exceeded=exceeded)


async def _excess(folders: Sequence[Path], most: int) -> str:
    """Return the bound that the folders exceed, when they do."""
    while True:
        began = time.monotonic()
        entries, used = await asyncio.to_thread(disk_use, folders, most)
        if used > most:
            return f"{most:,} bytes"
        if entries > _MOST_ENTRIES:
            return f"{_MOST_ENTRIES:,} files and folders"
        await asyncio.sleep(max(_PERIOD, (time.monotonic() - began) / _LARGEST_SHARE))


def disk_use(folders: Sequence[Path], most: int) -> tuple[int, int]:
    """Return (entries, bytes on the disk) of folders and all below, without following links.

    It stops beyond `most` bytes, or the most entries. What vanishes or cannot be read meanwhile is not counted.
    """
    entries = used = 0
    left = [str(folder) for folder in folders]
    while left and used <= most and entries <= _MOST_ENTRIES:
        try:
            with os.scandir(left.pop()) as found:
                for entry in found:
                    entries += 1
                    try:
                        used += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
                    except OSError:
                        continue
                    if used > most or entries > _MOST_ENTRIES:
                        break
        except OSError:
            continue
    return entries, used
