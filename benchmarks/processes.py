"""The processes of a benchmark, read from /proc."""

from __future__ import annotations

from pathlib import Path


def process_tree(root: int) -> list[int]:
    """Process ids of `root` and of all its running descendants, parents first."""
    tree = [root]
    for pid in tree:  # the list grows during the iteration
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                tree += [int(child) for child in children.read_text().split()]
            except OSError:  # the process has ended
                continue
    return tree


def has_ended(pid: int) -> bool:
    """Return True if there is no such process, or if it only waits for its parent to ask for its exit status."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return "\nState:\tZ" in status
