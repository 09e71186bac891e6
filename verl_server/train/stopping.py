"""`StopRequest`: SIGINT, SIGTERM and SIGHUP end a training run in order, and a rollout that runs is cancelled.

`run.py` installs it. The first signal is a request: the optimizer steps and the push of a step are completed, and the
run ends at the next rollout, with everything saved (`run_end`). A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from verl_server.errors import VerlServerError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunStoppedError(VerlServerError):
    """The run was stopped by a signal."""

    def __init__(self, message: str, signal_number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number
        """The status that a shell reports for a process that the signal ended: 130 for SIGINT, 143 for SIGTERM."""


class StopRequest:
    """The request to stop, if there is one. Without `installed`, nothing requests a stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """The signal that requested the stop, here or on another rank."""
        self._received = 0
        self._is_forwarded = False
        self.is_interruptible = False
        """True inside a block of `interruptible`."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle the signals during the block. A signal that the process ignores (nohup) stays ignored.

        Handle nothing outside of the main thread, where Python permits no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous: dict[signal.Signals, Any] = {}
        try:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._on_signal)
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop interrupt the block anywhere: a rollout, a pause. The block then raises RunStoppedError."""
        self.check()
        self.is_interruptible = True
        try:
            yield
        except asyncio.CancelledError:
            if self.signal_number is None:
                raise
            raise self.error() from None
        finally:
            self.is_interruptible = False
        # A rollout that ended in spite of the request is complete, so it is used.

    def check(self) -> None:
        """Raise RunStoppedError if a stop was requested."""
        if self.signal_number is not None:
            raise self.error()

    def error(self) -> RunStoppedError:
        number = signal.Signals(self.signal_number or signal.SIGTERM)
        return RunStoppedError(f"The run was stopped by {number.name}.", number)

    def forward(self, number: int) -> None:
        """Stop this rank because another rank received a request to stop. Any thread may call it."""
        if self.signal_number is None:
            self._is_forwarded = True
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # also wakes an event loop

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._is_forwarded:
            self._is_forwarded = False
        else:
            self._received += 1
        if self._received > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.signal_number is None:
            self.signal_number = number
        if self.is_interruptible:
            self._interrupt()

    def _interrupt(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.is_interruptible = False
            raise self.error() from None
        # Episodes that are cancelled abort their generation on the server and close their environments.
        loop.call_soon_threadsafe(_cancel_all, loop)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
