"""The process of the trackers: takes figures from the trainer, and writes them with the packages of the trackers.

`Trackers` starts it on rank 0. In a process of its own, a package that is slow to import, that hangs, that waits at the
exit of the interpreter, or that crashes, costs the trainer nothing. Each tracker has a thread and a bounded queue, so
one that hangs delays no other.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from verl_server.ipc.child_process import child_main
from verl_server.train.trackers.kinds import REMEDIES, open_tracker
from verl_server.train.trackers.tracked_run import Earlier, EarlierRuns, Figures, RunIsOver, TrackedRun

logger = logging.getLogger(__name__)

QUEUED = 1000
"""Most figures that wait for a tracker."""
_NO_END = RunIsOver(exit_status=1)
"""What trackers are told if the trainer has gone without a word."""


class TrackersArgument(msgspec.Struct):
    """The argument of the process."""

    names: list[str]
    run: TrackedRun
    pipe: int
    """Descriptor from which figures are read."""
    flush_seconds: float
    """Most seconds that all trackers have, after the end of the run, to write what is left."""


class TrackerThread:
    """A tracker with its thread. After its first failure, it takes nothing more."""

    def __init__(self, name: str, run: TrackedRun, runs: EarlierRuns) -> None:
        self.name = name
        self._run = run
        self._runs = runs
        self._queue = queue.Queue[Figures | RunIsOver](maxsize=QUEUED)
        self._is_left_out = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, message: Figures | RunIsOver) -> None:
        if self._is_left_out:
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._leave_out(f"it has not taken the figures of the last {QUEUED} steps")

    def join(self, deadline: float) -> None:
        """Wait for the end of the thread, at most until `deadline`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._leave_out("it has not written its last figures in time")

    def _work(self) -> None:
        try:
            tracker = open_tracker(self.name, self._run)
            known = self._run.earlier.get(self.name, Earlier(tracker.run_id or ""))
            while isinstance(message := self._queue.get(), Figures):
                if self._is_left_out:
                    return
                if tracker.run_id is None:
                    tracker.log(message)
                elif message.step > known.last.get(message.kind, -1):
                    tracker.log(message)
                    known = Earlier(tracker.run_id, known.last | {message.kind: message.step})
                    self._runs.store(self.name, known)
            tracker.close(message.exit_status)
        except (Exception, SystemExit) as error:  # a package may end the process that it is in
            text = str(error).strip() or "no message"
            self._leave_out(f"{type(error).__name__}: {text}")

    def _leave_out(self, reason: str) -> None:
        if not self._is_left_out:
            self._is_left_out = True
            logger.error(
                "The tracker %s is left out from now on: %s. The run goes on, and metrics.jsonl has all steps. %s",
                self.name,
                reason.rstrip("."),
                REMEDIES[self.name],
            )


def _main(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    ready({})
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    args = msgspec.convert(argument, TrackersArgument)
    incoming = Connection(args.pipe, writable=False)
    runs = EarlierRuns(args.run)
    trackers = [TrackerThread(name, args.run, runs) for name in args.names]
    end = _NO_END
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = msgspec.msgpack.decode(incoming.recv_bytes(), type=Figures | RunIsOver)  # type: ignore[arg-type]
            if isinstance(message, RunIsOver):
                end = message
                break
            for tracker in trackers:
                tracker.put(message)
    deadline = time.monotonic() + args.flush_seconds
    for tracker in trackers:
        tracker.put(end)
    for tracker in trackers:
        tracker.join(deadline)


if __name__ == "__main__":
    child_main(_main)
