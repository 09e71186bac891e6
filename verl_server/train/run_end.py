"""`RunEnd`: at the end of a training run, for any reason, all ranks agree on one state of the weights and save it.

`run.py` creates one for each run. If the run ends with an error on one rank, the others may wait for that rank in a
collective, which nothing can interrupt. So each rank has a watch thread. The watch thread learns through torch's store
that a rank has failed. If the main thread does not arrive within `_GRACE` seconds, the watch thread saves in its place
and ends the process. To save, a rank needs only the stored weights and separate connections (`SaveGroup`).

`StepCounter` counts optimizer steps. A rank that is one step behind completes this step, which needs no other rank. If
a rank has died, or an optimizer step failed halfway, nothing is saved, and the last checkpoint stays.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from verl_server.errors import VerlServerError
from verl_server.train.ranks import SaveGroup
from verl_server.train.stopping import RunStoppedError, StopRequest

_POLL = 0.2
"""Seconds between two reads of the store."""
_GRACE = 2.0
"""Seconds that the main thread has to arrive after another rank failed."""
_ROLLOUT_GRACE = 15.0
"""Seconds that a rollout has to end after a stop was requested."""
_STEP_TIMEOUT = 60.0
"""Seconds that a rank which is behind has to complete its optimizer step."""


class RunEndedError(VerlServerError):
    """The run has ended because another rank failed, or it could not be saved."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class StepCounter:
    """Counter of the optimizer steps of this rank. Another thread can stop the main thread before the next step."""

    def __init__(self) -> None:
        self.applied = 0
        """Number of complete optimizer steps."""
        self.last_step: int | None = None
        """The training step of the last complete optimizer step."""
        self.is_torn = False
        """True if an optimizer step failed halfway, so that weights and optimizer state do not fit each other."""
        self.written: torch.cuda.Event | None = None
        """On CUDA: event after the writes of the last step's weights."""
        self._limit: int | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def step(self, training_step: int) -> Iterator[None]:
        """Count the block as one optimizer step. Wait while `hold` forbids it."""
        with self._changed:
            self._changed.wait_for(lambda: self._limit is None or self.applied < self._limit)
            self.is_torn = True
            yield
            if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self.written = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.written.record()
            self.is_torn = False
            self.applied += 1
            self.last_step = training_step
            self._changed.notify_all()

    def hold(self) -> int:
        """Permit no further step, and return the number of complete ones."""
        with self._changed:
            self._limit = self.applied
            return self.applied

    def complete(self, count: int, timeout: float) -> None:
        """Permit steps until `count` are complete, and wait for them for at most `timeout` seconds."""
        with self._changed:
            self._limit = count
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.applied >= count or self.is_torn, timeout)


class Progressing(msgspec.Struct, array_like=True):
    """The progress of a rank. The largest numbers of any rank apply to all ranks."""

    next_step: int
    version: int


class _Entry(msgspec.Struct, array_like=True):
    """The report of a rank at the end."""

    applied: int
    progress: Progressing
    is_torn: bool = False
    failure: tuple[str, str] | None = None
    """(type, message) of the error that ended the run on this rank."""
    exit_status: int = 0
    failed_at: float = 0.0
    is_copy: bool = False
    """True if the error was raised on another rank and passed on."""


@dataclass
class _Verdict:
    """The end of the run on all ranks."""

    first: tuple[str, str] | None
    """(type, message) of the error that was raised first."""
    is_mine: bool
    """True if this rank raised it."""
    exit_status: int
    """The exit status of all ranks."""
    saved: str
    is_saved: bool = True

    def unsaved(self, reason: str) -> _Verdict:
        return replace(self, saved=reason, is_saved=False, exit_status=1)

    def describe(self) -> str:
        if self.first is None:
            return self.saved
        name, message = self.first
        text = message if name == RunStoppedError.__name__ else f"{name}: {message}"
        return f"{text.rstrip('.')}. {self.saved}"


@dataclass
class RunState:
    """The state of a run that `RunEnd` reads and saves."""

    steps: StepCounter
    progress: Callable[[], Progressing]
    """Return the progress of this rank. It is called when this rank's optimizer steps are complete."""
    save: Callable[[Progressing], None]
    """Write checkpoint and model through the `SaveGroup` of this `RunEnd`. All ranks call it."""
    where: str
    """The folder that `save` writes, for messages."""
    ended: Callable[[int, str | None], None] = lambda status, error: None
    """Take the run's exit status and its error. It is called once, when the run is saved or cannot be saved."""


class RunEnd:
    """The end of a run on one rank. Use it as a context manager around the steps."""

    def __init__(self, stop: StopRequest, saving: SaveGroup, device: torch.device) -> None:
        """Every rank makes a RunEnd. No other code uses `saving`."""
        self._stop, self._saving, self._device = stop, saving, device
        self._state: RunState | None = None
        self._lock = threading.Lock()
        self._has_begun = False
        self._finished = threading.Event()
        # The watch thread has a client of its own, because the main thread may wait for long in the other one.
        store: Any = dist.distributed_c10d._get_default_store() if saving.ranks.size > 1 else None
        self._store = None if store is None else store.clone()
        self._thread = threading.Thread(target=self._watch, name="verl-run-end", daemon=True)

    def __enter__(self) -> RunEnd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()

    def protect(self, state: RunState) -> None:
        """Save `state` from now on at the end of the run, for any reason of the end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the initial weights are written
        self._state = state

    def finish(self, error: BaseException | None = None) -> None:
        """Save the run, which ended with `error` on this rank (None: it is complete).

        Return if the run is complete on all ranks and saved. Otherwise raise `error` if it was the first error of all
        ranks, else RunEndedError. A note of the error says what was saved.
        """
        if not self._begin():
            threading.Event().wait()  # the watch thread saves, and ends the process
        verdict = self._end(error)
        self._report(verdict)
        if verdict.first is None and verdict.is_saved:
            return
        if error is not None and verdict.is_mine and verdict.is_saved:
            error.add_note(verdict.saved)
            raise error
        raise RunEndedError(verdict.describe(), verdict.exit_status) from error

    def _report(self, verdict: _Verdict) -> None:
        is_complete = verdict.first is None and verdict.is_saved
        assert self._state is not None
        self._state.ended(verdict.exit_status, None if is_complete else verdict.describe())

    # -- one rank's part of the end -----------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Return True to the first thread that calls it."""
        with self._lock:
            first, self._has_begun = not self._has_begun, True
            return first

    def _end(self, error: BaseException | None) -> _Verdict:
        """Agree with the other ranks on the state to save, and save it."""
        assert self._state is not None
        state = self._state
        mine = _Entry(state.steps.hold(), state.progress(), state.steps.is_torn)
        if error is not None:
            mine.failure, mine.exit_status = (type(error).__name__, str(error)), exit_status(error)
            mine.failed_at, mine.is_copy = time.time(), any("Raised on rank" in n for n in notes_of(error))
            self._announce("end", self._saving.ranks.rank)
        saved = f"Checkpoint, model and metrics are saved in {state.where}; --resume continues the run."
        verdict = _Verdict(mine.failure, error is not None, mine.exit_status, saved)
        try:
            entries = self._exchange("the end of the run", mine)
            failed = [entry for entry in entries if entry.failure is not None]
            if failed:
                first = min(failed, key=lambda entry: (entry.is_copy, entry.failed_at))
                is_mine = entries.index(first) == self._saving.ranks.rank
                verdict = _Verdict(first.failure, is_mine, first.exit_status, saved)
            target = max(entry.applied for entry in entries)
            state.steps.complete(target, _STEP_TIMEOUT)
            mine.applied, mine.progress, mine.is_torn = state.steps.applied, state.progress(), state.steps.is_torn
            entries = self._exchange("the weights to save", mine)
        except VerlServerError as lost:
            return verdict.unsaved(f"Not all ranks are there, so the last checkpoint is the result. {lost}")
        if any(entry.is_torn or entry.applied != target for entry in entries):
            return verdict.unsaved("An optimizer step failed halfway, so the last checkpoint is the result.")
        progress = Progressing(
            max(entry.progress.next_step for entry in entries), max(entry.progress.version for entry in entries)
        )
        try:
            with self._own_stream():
                state.save(progress)
            self._exchange("the run is saved", mine)  # torchrun ends all ranks when the first of them has ended
        except Exception as failure:
            return verdict.unsaved(f"Saving failed, so the last checkpoint is the result. {failure}")
        return verdict

    def _exchange(self, what: str, mine: _Entry) -> list[_Entry]:
        gathered = self._saving.ranks.gather(what, lambda: msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(data, type=_Entry) for data in gathered]

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On CUDA, copy in a stream that does not wait for collectives in which another rank is missing."""
        if self._device.type != "cuda":
            yield
            return
        assert self._state is not None
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if (written := self._state.steps.written) is not None:
            stream.wait_event(written)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    # -- the watch thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        stop_announced, stopped_at, failed_at = False, 0.0, 0.0
        while not self._finished.wait(_POLL):
            now = time.monotonic()
            if (number := self._stop.signal_number) is not None and not stop_announced:
                self._announce("stop", number)
                stop_announced, stopped_at = True, now
            elif not stop_announced and (told := self._announced("stop")) is not None:
                self._stop.forward(told)
            if not failed_at and self._announced("end") is not None:
                failed_at = now
            hung = stop_announced and self._stop.is_interruptible and now - stopped_at > _ROLLOUT_GRACE
            late = failed_at and now - failed_at > _GRACE
            if (hung or late) and self._state is not None:
                if self._begin():
                    self._end_for_main(self._stop.error() if hung and not late else None)
                return

    def _end_for_main(self, error: BaseException | None) -> None:
        """End the run in place of the main thread, which may wait forever, and end the process."""
        status = 1
        try:
            verdict = self._end(error)
            status = verdict.exit_status
            self._report(verdict)
            if self._saving.ranks.rank == 0:
                print(f"The run has ended. {verdict.describe()}", file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _announce(self, key: str, value: int) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that has the store is gone
                self._store.compare_set(f"verl_server/{key}", "", str(value))

    def _announced(self, key: str) -> int | None:
        if self._store is None:
            return None
        try:
            return int(self._store.get(f"verl_server/{key}")) if self._store.check([f"verl_server/{key}"]) else None
        except RuntimeError:
            return None


def exit_status(error: BaseException) -> int:
    """Return the exit status of a run that ended with `error`: 130 for KeyboardInterrupt, else its own, or 1."""
    return 130 if isinstance(error, KeyboardInterrupt) else int(getattr(error, "exit_status", 1))


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
