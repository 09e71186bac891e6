"""The faults that a follower of a growing file met, and the size of a file that may be gone.

`segment_tail` follows lines, and `watch.index.store_frames` the records of a session store.
"""

from __future__ import annotations

from pathlib import Path

_WARNINGS = 20
"""Most faults whose text is kept."""
_LONGEST_TEXT = 500


class Faults:
    """The lines and files that could not be read."""

    def __init__(self) -> None:
        self.damaged = 0
        """Number of places that were skipped, because they cannot be read."""
        self.warnings: list[str] = []
        """The first faults, each with its file."""

    def skip(self, text: str) -> None:
        """Count a place that was skipped. `text` says where and why."""
        self.damaged += 1
        self._keep(text)

    def unreadable(self, file: Path, error: OSError) -> None:
        """Note a file that cannot be read now. Nothing of it is skipped: it is tried again."""
        self._keep(f"Cannot read {file}: {error.strerror or error}.")

    def _keep(self, text: str) -> None:
        if text not in self.warnings and len(self.warnings) < _WARNINGS:
            self.warnings.append(text[:_LONGEST_TEXT])


def size_of(file: Path) -> int:
    """Return the bytes of a file, 0 if it cannot be read."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
