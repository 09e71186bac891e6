"""Points at which a test holds a scheduler process, without sleeps or polling.

A test sets a `trap`, which listens on a socket in a folder. A server process that reaches that point (see `scheduler`)
connects and waits for a word. Without a trap it continues at once. The end of the test also lets it continue.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

FOLDER = "VERL_TEST_PAUSES"
"""Environment variable that names the folder."""
POINTS = ("staging", "turn", "copying")
"""Before a request is staged; when a staged request has its turn; when half of its bytes are written."""
_HOLD_SECONDS = 60.0


class Trap:
    """A trap for one process at one point."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._held: socket.socket | None = None

    def wait(self, seconds: float = 20.0) -> None:
        """Wait until a process has reached the point. The next process may pass."""
        self._listener.settimeout(seconds)
        self._held, _ = self._listener.accept()
        self._listener.close()

    def go(self, word: str = "go") -> None:
        """Let the process continue. With "fail", the process raises an error."""
        assert self._held is not None, "call `wait` first"
        self._held.sendall(word.encode())

    def close(self) -> None:
        if self._held is not None:
            self._held.close()


@contextlib.contextmanager
def trap(folder: Path, point: str, tp_rank: int) -> Iterator[Trap]:
    """Hold the next call on rank `tp_rank` that reaches `point`."""
    assert point in POINTS
    path = _path(folder, point, tp_rank)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        held = Trap(listener)
        try:
            yield held
        finally:
            path.unlink()
            held.close()


def hold(point: str, tp_rank: int) -> None:
    """Wait here, in the process of the server, if a trap is set."""
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(str(_path(Path(os.environ[FOLDER]), point, tp_rank)))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        end.settimeout(_HOLD_SECONDS)
        if end.recv(16) == b"fail":
            raise RuntimeError("a fault that a test made")


def _path(folder: Path, point: str, tp_rank: int) -> Path:
    return folder / f"{point}-{tp_rank}"
