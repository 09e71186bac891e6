"""`CheckpointWriter`: writes the checkpoints of a run while its steps go on.

`run` calls it on all ranks, between two steps. `begin` copies this rank's shards into host memory (`host_copy`), for
which the run waits, and hands the copy to a thread. The thread writes it through connections of its own, as
`checkpoints` says: under a temporary name, flushed, renamed. Then it removes older checkpoints (`kept_checkpoints`).

`settle`, between two later steps, finds on all ranks alike that the checkpoint is on the disk, or that it failed. Only
then follows what needs a checkpoint on the disk, in the thread that calls: the algorithm compacts its journal,
`CheckpointSaved` is written, and evaluations of these weights are recorded (`when_saved`). A run that is killed before
has the checkpoint before this one, and all groups that this one needs.

At most one checkpoint is being written: the next `begin` waits for it, and so does `finish`, with which `RunEnd` saves
the end of the run in whatever thread is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from verl_server.engine.rank_group import RankGroup
from verl_server.train.checkpoints import CheckpointError, Progress, state_of, write_checkpoint
from verl_server.train.host_copy import HostCopy
from verl_server.train.kept_checkpoints import remove_old_checkpoints
from verl_server.train.ranks import SAVE_TIMEOUT, SaveGroup
from verl_server.train.run_end import Progressing
from verl_server.train.trainer_state import TrainerState
from verl_server.watch.run_records import CheckpointSaved, RunEvent

logger = logging.getLogger(__name__)

THREAD = "checkpoint-writer"
"""Name of the thread that writes a checkpoint."""


class SavedRun(Protocol):
    """The algorithm of a run, as far as the writer needs it."""

    state: TrainerState
    """The models to write."""

    def checkpoint(self, reached: Progressing) -> Progress:
        """Return the progress of a checkpoint of the state `reached`, which is written now. All ranks call it.

        What a run needs that continues from it stays, and so does what the checkpoint before it needs.
        """

    def saved(self, progress: Progress) -> None:
        """Remove what no run needs that continues from the checkpoint of `progress`, which is on the disk."""


class _Outcome(msgspec.Struct, array_like=True):
    """How far a rank's thread is."""

    has_ended: bool
    error: str | None = None


class _Write:
    """A checkpoint that a thread writes."""

    def __init__(self, progress: Progress, held_seconds: float, write: Callable[[], bool]) -> None:
        self.progress = progress
        self.held_seconds = held_seconds
        """Seconds for which the run waited before it went on."""
        self.seconds = 0.0
        """Seconds that the thread took."""
        self.is_new = False
        """False if the checkpoint of this step was on the disk already, or if it is not there yet."""
        self.error: Exception | None = None
        self._call = write
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return f"checkpoint-{self.progress.next_step}"

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> None:
        """Wait until the thread has ended. Raise CheckpointError `timeout` seconds after the first call."""
        self._deadline = self._deadline or time.monotonic() + timeout
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if not self.has_ended:
            raise CheckpointError(
                f"{self.name} was not written within {timeout:g} s. If the disk only needs more time, set a larger "
                "--save-timeout."
            )

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self.is_new = self._call()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - start


class CheckpointWriter:
    """The writer of the checkpoints of a run on one rank."""

    def __init__(
        self,
        out: Path,
        algorithm: SavedRun,
        ranks: RankGroup,
        beside: SaveGroup,
        final: SaveGroup,
        *,
        keep: int,
        timeout: float = SAVE_TIMEOUT,
        in_background: bool = True,
        note: Callable[[RunEvent], None] = lambda event: None,
    ) -> None:
        """Prepare to write into the folder `out`. All ranks call it together.

        `ranks` are the connections of the steps. The thread uses `beside`, and `finish` uses `final`. `keep` is the
        number of newest checkpoints that stay. `timeout` bounds the wait for a thread, in seconds. Without
        `in_background`, `begin` returns when the checkpoint is on the disk, and there is no copy. `note` takes the
        events of checkpoints that are on the disk.
        """
        self._out = out
        self._algorithm = algorithm
        self._ranks = ranks
        self._beside, self._final = beside, final
        self._keep = keep
        self._timeout = timeout
        self._copy = HostCopy() if in_background else None
        self._note = note
        self._write: _Write | None = None
        """The checkpoint that is being written, until `settle` or `finish` has found its end."""
        self._waiting: list[Callable[[], None]] = []

    def when_saved(self, act: Callable[[], None]) -> None:
        """Call `act` when the checkpoint that is being written is on the disk: now, if none is.

        `act` is not called if the checkpoint cannot be written.
        """
        if self._write is None:
            act()
        else:
            self._waiting.append(act)

    def begin(self, reached: Progressing) -> None:
        """Write a checkpoint of the state `reached`. Return when the next step may change it.

        All ranks call it together, between two steps. Wait for the checkpoint before first. Raise CheckpointError on
        all ranks if that one, or without a background this one, cannot be written.
        """
        start = time.monotonic()
        self.settle(wait=True)
        progress = self._algorithm.checkpoint(reached)
        if self._copy is None:
            self._save(progress, self._beside, start)
            return
        copy, copied = self._copy, dict[str, Any]()

        def take() -> bytes:
            copied.update(copy.take(state_of(self._algorithm.state.models, progress)))
            return b""

        self._ranks.gather("CheckpointWriter.begin", take)  # no thread waits for a rank without memory
        self._write = _Write(progress, time.monotonic() - start, lambda: self._put(copied, progress, self._beside))

    def settle(self, *, wait: bool = False) -> None:
        """Find out on all ranks if the checkpoint that is being written is on the disk, and note it.

        All ranks call it together, between two steps. It costs nothing if none is being written. With `wait`, wait for
        its end. Raise CheckpointError on all ranks if it cannot be written.
        """
        if (write := self._write) is None:
            return

        def outcome() -> bytes:
            late: CheckpointError | None = None
            if wait:
                try:
                    write.wait(self._timeout)
                except CheckpointError as error:
                    late = error
            if not write.has_ended:
                return msgspec.msgpack.encode(_Outcome(False, None if late is None else str(late)))
            return msgspec.msgpack.encode(_Outcome(True, None if write.error is None else str(write.error)))

        found = self._ranks.gather("CheckpointWriter.settle", outcome)
        outcomes = [msgspec.msgpack.decode(data, type=_Outcome) for data in found]
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            if write.has_ended:
                self._write, self._waiting = None, []
            raise CheckpointError(errors[0]) from write.error
        if all(outcome.has_ended for outcome in outcomes):
            self._note_end(write)

    def finish(self, reached: Progressing) -> None:
        """Write the state `reached` at the end of the run, when no step changes it any more.

        All ranks call it, in any thread. Wait for the checkpoint that is being written first. If that one failed, try
        again with this one. Raise CheckpointError on all ranks if it cannot be written.
        """
        start = time.monotonic()
        self._final.ranks.gather("CheckpointWriter.finish", self._wait)
        self.close()
        self._save(self._algorithm.checkpoint(reached), self._final, start)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, after the last step, and note its end. Raise nothing."""
        if (write := self._write) is None:
            return
        try:
            write.wait(self._timeout)
            self._note_end(write)
        except (CheckpointError, OSError) as error:  # an evaluation of these weights cannot be recorded
            logger.error("%s", error)

    def _wait(self) -> bytes:
        if self._write is not None:
            self._write.wait(self._timeout)
        return b""

    def _note_end(self, write: _Write) -> None:
        waiting, self._waiting, self._write = self._waiting, [], None
        if write.error is not None:
            logger.warning("%s", write.error)
            return
        self._algorithm.saved(write.progress)
        if write.is_new:
            self._note(CheckpointSaved(name=write.name, seconds=write.seconds, held_seconds=write.held_seconds))
        for act in waiting:
            act()

    def _save(self, progress: Progress, group: SaveGroup, start: float) -> None:
        """Write a checkpoint of the models themselves, while the run waits for it since the time `start`."""
        begun = time.monotonic()
        is_new = self._put(state_of(self._algorithm.state.models, progress), progress, group)
        now = time.monotonic()
        self._algorithm.saved(progress)
        if is_new:
            name = f"checkpoint-{progress.next_step}"
            self._note(CheckpointSaved(name=name, seconds=now - begun, held_seconds=now - start))

    def _put(self, state: dict[str, Any], progress: Progress, group: SaveGroup) -> bool:
        """Return False if the checkpoint was on the disk already."""
        is_new = write_checkpoint(self._out, state, progress, group)
        group.ranks.call("checkpoints", lambda _: remove_old_checkpoints(self._out, self._keep))
        return is_new
