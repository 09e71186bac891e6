"""`Interrupts`: SIGTERM and SIGHUP end a rollout as Ctrl-C does: its programs, sessions and folders end with it.

A scheduler of a cluster sends SIGTERM, and a closed terminal SIGHUP. `rollout` and `agents` use it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """The signals that ended a rollout."""

    def __init__(self) -> None:
        self._number = signal.SIGINT

    @property
    def exit_status(self) -> int:
        """The status that a shell reports for the signal: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self._number

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Turn SIGTERM and SIGHUP into SIGINT until the block ends. Another thread than the main one has no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._as_ctrl_c) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _as_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        self._number = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)
