"""`Trackers`: the trainer's side of the trackers of `--logger`.

`run` opens it when the first step is known, calls `log_step` for each recorded step, `log_evaluation` for each
evaluation, and `close` when the run has ended. None of these calls waits for a tracker or raises, except that `close`
waits for what is left, within a bound. `demo` uses `open_trackers` instead. A thread sends the figures to the process
of the trackers (`process`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from verl_server.ipc.child_process import ChildProcess, describe_exit
from verl_server.train.metrics import StepMetrics
from verl_server.train.run_end import exit_status
from verl_server.train.trackers.names import figures_of_evaluation, figures_of_step
from verl_server.train.trackers.process import QUEUED, TrackersArgument
from verl_server.train.trackers.tracked_run import Figures, RunIsOver, TrackedRun

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 30.0
"""Seconds that the trackers have at the end of a run to write what is left."""
_EXIT_SECONDS = 5.0
"""Further seconds after which their process is killed."""
_MODULE = "verl_server.train.trackers.process"


class Trackers:
    """The trackers of a run. The main thread calls it, or another one in its place at the end of the run."""

    def __init__(self, names: Sequence[str], run: TrackedRun, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        """Start the process of the trackers, and do not wait for it. Without names, nothing is started."""
        self._flush_seconds = flush_seconds
        self._queue = queue.Queue[Figures | RunIsOver](maxsize=QUEUED)
        self._child: ChildProcess | None = None
        self._takes_figures = False
        self._lock = threading.Lock()
        """Held while `_takes_figures` changes, so that one reason is logged."""
        if not names:
            return
        incoming, outgoing = Pipe(duplex=False)
        argument = msgspec.to_builtins(TrackersArgument(list(names), run, incoming.fileno(), flush_seconds))
        with incoming:
            try:
                self._child = ChildProcess("trackers", _MODULE, argument, pass_fds=(incoming.fileno(),))
            except OSError as error:
                outgoing.close()
                _log_end(f"Their process cannot be started: {error}")
                return
        self._takes_figures = True
        threading.Thread(target=self._send, args=(self._child, outgoing), name="trackers", daemon=True).start()

    def log_step(self, metrics: StepMetrics) -> None:
        """Hand a recorded step on."""
        self._offer(Figures("step", metrics.step, figures_of_step(metrics)))

    def log_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Hand an evaluation on: a line of evaluations.jsonl."""
        self._offer(Figures("evaluation", int(evaluation["step"]), figures_of_evaluation(evaluation)))

    def close(self, exit_status: int) -> None:
        """Let the trackers write what is left, within a bound, and end their process."""
        if self._child is None:
            return
        self._offer(RunIsOver(exit_status))
        if self._takes_figures:
            try:
                self._check_exit(self._child.popen.wait(self._flush_seconds + _EXIT_SECONDS))
            except subprocess.TimeoutExpired:
                self._leave_out("Their process did not end in time and is killed; last figures may be missing")
        self._takes_figures = False
        self._child.terminate(grace=0)
        self._child.log_tail()  # returns when what the trackers printed last is on the standard error

    def _offer(self, message: Figures | RunIsOver) -> None:
        if self._takes_figures:
            try:
                self._queue.put_nowait(message)
            except queue.Full:
                self._leave_out(f"Their process has not read the last {QUEUED} messages")

    def _send(self, child: ChildProcess, outgoing: Connection) -> None:
        """Send until the run is over. It is a thread of its own, because a process that is stopped reads nothing."""
        message: Figures | RunIsOver | None = None
        try:
            with outgoing:
                while not isinstance(message, RunIsOver):
                    message = self._queue.get()
                    outgoing.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            self._check_exit(child.popen.wait())

    def _check_exit(self, code: int) -> None:
        if code:
            self._leave_out(f"Their process has ended with {describe_exit(code)}")

    def _leave_out(self, reason: str) -> None:
        with self._lock:
            took_figures, self._takes_figures = self._takes_figures, False
        if took_figures:
            _log_end(reason)


@contextlib.contextmanager
def open_trackers(names: Sequence[str], run: TrackedRun) -> Iterator[Trackers]:
    """Yield the trackers, and close them with the exit status of what ended the context."""
    trackers, status = Trackers(names, run), 0
    try:
        yield trackers
    except BaseException as error:
        status = exit_status(error)
        raise
    finally:
        trackers.close(status)


def _log_end(reason: str) -> None:
    logger.error("Trackers are left out from now on. %s. The run goes on, and metrics.jsonl has all steps.", reason)
