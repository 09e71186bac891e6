"""Resources of processes, read from /proc and the GPU driver, to find leaks and to check that memory is freed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch


def footprint(pids: Iterable[int]) -> dict[str, int]:
    """Resources of processes, summed.

    Counts: file_descriptors, mappings, threads. Resident bytes: private_bytes, shared_bytes. memfd_bytes is the size of
    all open memfds and files in /dev/shm, each counted once.
    """
    totals = dict.fromkeys(
        ("file_descriptors", "mappings", "threads", "private_bytes", "shared_bytes", "memfd_bytes"), 0
    )
    shared: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            own, memory = _of_process(pid)
            totals |= {name: totals[name] + value for name, value in own.items()}
            shared |= memory
    totals["memfd_bytes"] = sum(shared.values())
    return totals


def _of_process(pid: int) -> tuple[dict[str, int], dict[tuple[int, int], int]]:
    """The resources of one process, and the bytes of its memfds and files in /dev/shm by (device, inode)."""
    shared: dict[tuple[int, int], int] = {}
    descriptors = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                status = os.stat(path)
                shared[status.st_dev, status.st_ino] = 512 * status.st_blocks
        except OSError:  # closed since, as the descriptor of the listing itself
            continue
        descriptors += 1
    status_lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in status_lines)}
    own = {
        "file_descriptors": descriptors,
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": int(fields["Threads"][0]),
    }
    if "RssAnon" in fields:  # a process that has ended, and whose parent has not noticed yet, has no memory
        own |= {"private_bytes": 1024 * int(fields["RssAnon"][0]), "shared_bytes": 1024 * int(fields["RssShmem"][0])}
    return own, shared


def device_used_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU by all processes, after this process has emptied its allocator's cache; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
