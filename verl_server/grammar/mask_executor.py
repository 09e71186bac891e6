"""`MaskExecutor`: advances matchers, and computes their masks in threads, without the interpreter's lock.

Each `matcher_process` owns one for its requests. Trials of grammars call `fill`.

Most masks take some 7 microseconds, and a few take milliseconds. So each thread takes one row after the other, and a
thread that is busy with a slow mask does not hold up the other rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from llguidance import LLExecutor

from verl_server.grammar.compiler import Matcher
from verl_server.grammar.mask_memory import FAILED, WRITTEN, States, Words

_THREADS = min(2, len(os.sched_getaffinity(0)))
"""The most slow masks that are computed at the same time.

After each mask, threads take turns at the interpreter's lock: with more of them, fast masks would take longer.
"""
_ROWS_PER_THREAD = 4
"""Number of rows for which one more thread is woken."""


class MaskRun:
    """Masks of one step. No other code may use the matcher of a row until the row is done."""

    def __init__(
        self,
        matchers: Sequence[Matcher],
        rows: Sequence[int],
        words: Words,
        states: States,
        note: Callable[[int, BaseException], None],
    ) -> None:
        """Matcher i writes row `rows[i]` of `words` int32 [rows of the step, words], and of `states` uint8, zeros.

        `note` is called in a thread with a row that failed and the reason, before the state of the row is set.
        """
        assert words.flags.c_contiguous and len(matchers) == len(rows)
        self.matchers, self.rows, self.states, self._note = matchers, rows, states, note
        self._words, self._row_bytes = words, words.strides[0]
        self._places = iter(range(len(matchers)))  # shared by the threads: a step of this iterator is atomic

    def compute(self) -> None:
        """Compute rows until none is left. Called in each thread that takes part."""
        for place in self._places:
            self.compute_place(place)

    def compute_place(self, place: int) -> None:
        """Compute the mask of matcher `place`."""
        matcher, row = self.matchers[place], self.rows[place]
        try:
            matcher.write_mask(self._words.ctypes.data + row * self._row_bytes, self._row_bytes)
            matcher.check()
        except BaseException as error:  # a panic of llguidance is no Exception
            self._note(row, error)
            self.states[row] = FAILED
        else:
            self.states[row] = WRITTEN


class MaskExecutor:
    """Advances matchers and fills masks. Its threads start at the first `start` and end with the process."""

    def __init__(self) -> None:
        self._own = LLExecutor(min(2, _THREADS))
        self._tasks: SimpleQueue[MaskRun] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def fill(self, matchers: Sequence[Matcher], words: Words) -> None:
        """Write the mask of each matcher into its row of `words` int32 [len(matchers), words]. No matcher twice.

        The row of a matcher that failed is undefined: `Matcher.check` raises its error.
        """
        assert words.flags.c_contiguous and len(words) == len(matchers)
        rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._own.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.shape[1] * 4, len(words))

    def start(self, run: MaskRun) -> None:
        """Compute the rows of a run in other threads."""
        while len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._work, name="grammar-masks", daemon=True)
            thread.start()
            self._threads.append(thread)
        for _ in range(min(_THREADS, -(-len(run.matchers) // _ROWS_PER_THREAD))):
            self._tasks.put(run)

    def consume(self, pairs: Sequence[tuple[Matcher, int]]) -> list[bool | BaseException]:
        """Advance each matcher by its token. Return for each whether its output is complete, or why it failed."""
        return [_consume(matcher, token) for matcher, token in pairs]

    def _work(self) -> None:
        while True:
            self._tasks.get().compute()


def _consume(matcher: Matcher, token: int) -> bool | BaseException:
    try:
        matcher.consume(token)
        if not matcher.is_complete:  # no further token but EOS is allowed, or it failed
            return False
        matcher.check()
    except BaseException as error:  # a panic of llguidance is no Exception
        return error
    return True
