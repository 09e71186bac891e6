"""`MaskExecutor`: advances matchers, and computes their masks in threads, without the interpreter's lock.

`StepMasks` owns a `MaskExecutor` and calls `start` and `consume` for each step. Trials of grammars call `fill`.

Most masks take some 7 microseconds, so a few threads suffice. A few masks take milliseconds. When all threads are busy
with such masks, another thread continues with the remaining rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from operator import length_hint
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from verl_server.grammar.compiler import Matcher

Words = npt.NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set if token t is allowed."""

_THREADS = min(8, os.cpu_count() or 1)
"""The most slow masks that are computed at the same time."""
_FIRST_THREADS = min(2, _THREADS)
"""Threads that begin with a run. Four took longer for 256 rows, because they wait for the interpreter's lock."""
_ROWS_PER_THREAD = 16
"""Number of rows for which one more thread is started."""
_POLL_SECONDS = 2e-4
"""Seconds. Threads that complete no mask in this time count as busy with slow masks."""
_LEAST_READY = 0.75
"""Fraction of the masks for which a step waits even if all threads are busy with slow masks."""


class MaskRun:
    """The masks of one step. No other code may use the matcher of a row until the row is done."""

    def __init__(self, matchers: Sequence[Matcher], words: Words, tasks: SimpleQueue[MaskRun]) -> None:
        assert words.flags.c_contiguous and len(words) == len(matchers)
        self.errors: dict[int, BaseException] = {}
        """Failures of the library, by row. A matcher that failed by itself is no such error: see `Matcher.check`."""
        self._matchers, self._tasks, self._words = matchers, tasks, words
        self._address, self._row_bytes = words.ctypes.data, words.strides[0]
        self._rows = iter(range(len(matchers)))  # shared by the threads: a step of this iterator is atomic
        self._done = bytearray(len(matchers))
        self._progress: SimpleQueue[None] = SimpleQueue()
        self._num_joined = 0

    def is_done(self, row: int) -> bool:
        """Return True if the mask of the row is written, or could not be computed."""
        return self._done[row] == 1

    @property
    def done(self) -> bytes:
        """A snapshot with 1 for each row that is done, else 0."""
        return bytes(self._done)

    @property
    def all_done(self) -> bool:
        return self._num_done() == len(self._done)

    def join(self) -> None:
        """Add one more thread to the run."""
        self._num_joined += 1
        self._tasks.put(self)

    def compute(self) -> None:
        """Compute rows until none is left. Called in each thread that takes part."""
        for row in self._rows:
            self.compute_row(row)
        self._progress.put(None)

    def compute_row(self, row: int) -> None:
        try:
            self._matchers[row].write_mask(self._address + row * self._row_bytes, self._row_bytes)
        except BaseException as error:  # a panic of llguidance is no Exception
            self.errors[row] = error
        self._done[row] = 1

    def wait(self, is_computed: Callable[[], bool] | None, least: int = 0) -> None:
        """Wait until all rows are done, or until the logits are computed and only slow rows are left.

        At least `least` rows are done then. With `is_computed` None, wait for all rows.
        """
        before = -1
        while not self.all_done:
            done, left = self._num_done(), length_hint(self._rows)
            if done == before:  # every thread is held up
                may_leave = done >= least and (left == 0 or done >= _LEAST_READY * len(self._done))
                if is_computed is not None and may_leave and is_computed():
                    return
                if left and self._num_joined < _THREADS:
                    self.join()
            before = done
            self._wait_a_moment()

    def wait_row(self, row: int) -> None:
        """Wait until the row is done. The limits of llguidance bound the time."""
        while not self.is_done(row):
            self._wait_a_moment()

    def _num_done(self) -> int:
        return self._done.count(1)

    def _wait_a_moment(self) -> None:
        try:
            self._progress.get(timeout=_POLL_SECONDS)
        except Empty:
            return


class MaskExecutor:
    """Advances matchers and fills masks. Its threads start at the first `start` and end with the process."""

    def __init__(self) -> None:
        self._own = LLExecutor(_FIRST_THREADS)
        self._tasks: SimpleQueue[MaskRun] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def fill(self, matchers: Sequence[Matcher], words: Words) -> None:
        """Write the mask of each matcher into its row of `words` int32 [len(matchers), words]. No matcher twice.

        The row of a matcher that failed is undefined: `Matcher.check` raises its error.
        """
        assert words.flags.c_contiguous and len(words) == len(matchers)
        rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._own.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.shape[1] * 4, len(words))

    def start(self, matchers: Sequence[Matcher], words: Words) -> MaskRun:
        """Start `fill` in another thread. `words` and the matchers belong to the run until their rows are done."""
        while len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._work, name="grammar-masks", daemon=True)
            thread.start()
            self._threads.append(thread)
        run = MaskRun(matchers, words, self._tasks)
        for _ in range(min(_FIRST_THREADS, -(-len(matchers) // _ROWS_PER_THREAD))):
            run.join()
        return run

    def consume(self, pairs: Sequence[tuple[Matcher, int]]) -> None:
        """Advance each matcher by its token. `Matcher.check` raises the errors."""
        self._own.consume_token_par([(matcher.inner, token) for matcher, token in pairs])

    def _work(self) -> None:
        while True:
            self._tasks.get().compute()
