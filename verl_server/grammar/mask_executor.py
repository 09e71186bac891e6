"""`MaskExecutor`: advances matchers, and computes their masks in threads, without the interpreter's lock.

The scheduler has one for its steps. Compilations and trials use `fill` with one thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from verl_server.grammar.compiler import Matcher

Words = npt.NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set if token t is allowed."""

_THREADS = min(8, os.cpu_count() or 1)
"""Threads that compute the masks of a step. On 16 cores, 256 rows took 4.9 ms with 8 threads and 5.0 ms with 16."""
_PARTS_PER_THREAD = 4
"""A mask that takes long delays the other rows of its part. More parts cost more handovers between threads."""


class MaskPart:
    """Some matchers of a step, whose masks one thread computes. Nobody else may use the matchers until it is done."""

    def __init__(self, start: int, matchers: Sequence[Matcher], words: Words, finished: SimpleQueue[MaskPart]) -> None:
        self.start = start
        """Index of the first matcher in the step."""
        self.done = threading.Event()
        """Set when the masks are written, or could not be computed."""
        self.error: BaseException | None = None
        """A failure of the library. A matcher that failed by itself is not an error: see `Matcher.check`."""
        self._matchers, self._words, self._finished = matchers, words, finished

    def __len__(self) -> int:
        return len(self._matchers)

    def compute(self, executor: LLExecutor) -> None:
        """Write the masks, and put this part into its queue."""
        try:
            _fill(executor, self._matchers, self._words)
        except BaseException as error:  # a panic of llguidance is no Exception
            self.error = error
        self.done.set()
        self._finished.put(self)


class MaskExecutor:
    """Threads start with the first `start` and end with the process."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._num_threads = threads
        self._own = LLExecutor(1)  # a token takes microseconds, so threads would only wait for each other
        self._tasks: SimpleQueue[MaskPart] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def fill(self, matchers: Sequence[Matcher], words: Words) -> None:
        """Write the mask of each matcher into its row of `words` int32 [len(matchers), words]. No matcher twice.

        The row of a matcher that failed is undefined: `Matcher.check` raises its error.
        """
        _fill(self._own, matchers, words)

    def start(self, matchers: Sequence[Matcher], words: Words) -> tuple[list[MaskPart], SimpleQueue[MaskPart]]:
        """Start `fill` in the threads. Return its parts in the order of the rows, and a queue of finished parts."""
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work, name="grammar-masks", daemon=True)
            thread.start()
            self._threads.append(thread)
        finished: SimpleQueue[MaskPart] = SimpleQueue()
        size = -(-len(matchers) // (self._num_threads * _PARTS_PER_THREAD))
        parts = [
            MaskPart(first, matchers[first : first + size], words[first : first + size], finished)
            for first in range(0, len(matchers), size)
        ]
        for part in parts:
            self._tasks.put(part)
        return parts, finished

    def consume(self, pairs: Sequence[tuple[Matcher, int]]) -> None:
        """Advance each matcher by its token. `Matcher.check` raises the errors."""
        self._own.consume_token_par([(matcher.inner, token) for matcher, token in pairs])

    def _work(self) -> None:
        executor = LLExecutor(1)
        while True:
            self._tasks.get().compute(executor)


def _fill(executor: LLExecutor, matchers: Sequence[Matcher], words: Words) -> None:
    assert words.flags.c_contiguous and len(words) == len(matchers)
    rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.shape[1] * 4, len(words))
