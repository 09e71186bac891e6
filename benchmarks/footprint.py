"""What processes hold, read from /proc and the driver: for finding leaks, and for seeing memory come and go."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch


def process_tree(root: int) -> list[int]:
    """`root` and all its living descendants."""
    tree = [root]
    for pid in tree:  # grows while it is walked
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                tree += [int(child) for child in children.read_text().split()]
            except OSError:  # gone meanwhile
                continue
    return tree


def footprint(pids: Iterable[int]) -> dict[str, int]:
    """Sums over processes.

    file_descriptors, mappings, threads; private_bytes and shared_bytes resident; memfd_bytes, of distinct memfds and
    files in /dev/shm that they have open.
    """
    totals = dict.fromkeys(
        ("file_descriptors", "mappings", "threads", "private_bytes", "shared_bytes", "memfd_bytes"), 0
    )
    shared: dict[tuple[int, int], int] = {}
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    status = os.stat(path)
                    shared[status.st_dev, status.st_ino] = 512 * status.st_blocks
            except OSError:  # closed meanwhile, as the descriptor that lists the folder
                continue
            totals["file_descriptors"] += 1
        totals["mappings"] += len(Path(f"/proc/{pid}/maps").read_text().splitlines())
        status_lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {key: value.split() for key, _, value in (line.partition(":") for line in status_lines)}
        totals["threads"] += int(fields["Threads"][0])
        totals["private_bytes"] += 1024 * int(fields["RssAnon"][0])
        totals["shared_bytes"] += 1024 * int(fields["RssShmem"][0])
    totals["memfd_bytes"] = sum(shared.values())
    return totals


def device_used_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU, by whatever process, after this one gave back what it only caches; 0 on CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
