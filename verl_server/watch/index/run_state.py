"""The state of a run and its stored settings, as `RunTail` follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from verl_server.errors import BadRequestError
from verl_server.files.run_output import is_claimed, stored_settings
from verl_server.watch.run_records import RunEnded, RunResumed, RunStarted

RunState = Literal["running", "ended", "failed", "unknown"]
"""running: a process holds the run. failed: the run ended with an error. unknown: there is neither a process of this
machine that holds the run nor an end of it: it was killed, or it runs on another machine."""

_LARGEST = 16 * 2**20
"""Bytes of settings beyond which they are not read."""


def state_of(path: Path, event: RunStarted | RunResumed | RunEnded | None) -> RunState:
    """Return the state of a run. `event` is the last one about a start or an end; None if the run writes no events.

    Runs without events write summary.json at their end.
    """
    if is_claimed(path):
        return "running"
    if isinstance(event, RunEnded):
        return "failed" if event.exit_status or event.error is not None else "ended"
    if event is None and path.is_dir() and (path / "summary.json").is_file():
        return "ended"
    return "unknown"


class StoredSettings:
    """The settings that a run stored beside its output, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        """`path` is the folder of a run, or a file of trajectories."""
        self.warnings: list[str] = []
        self._path = path
        self._read: dict[str, Any] = {}
        self._version: tuple[int, int, int] | None = None

    def read(self) -> dict[str, Any]:
        """Return the settings, {} if there are none, and the earlier ones if the file is damaged."""
        file = self._path / "run.json" if self._path.is_dir() else self._path.with_name(f"{self._path.name}.run.json")
        try:
            stat = file.stat()
        except OSError:
            return self._read
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if version != self._version:
            self._version = version
            try:
                if stat.st_size > _LARGEST:
                    raise BadRequestError(f"{file} has {stat.st_size:,} bytes, too many for settings.")
                self._read, self.warnings = stored_settings(file), []
            except BadRequestError as error:
                self.warnings = [str(error)[:500]]
        return self._read
