"""`MaskProgress`: which masks of a step are written, seen by the scheduler, which waits for them.

`MatcherClient.start` returns one for each step, and `StepMasks` waits. Whoever writes a mask sets the state of its row
afterwards, in memory that both share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import numpy as np

from verl_server.grammar.mask_memory import FAILED, PENDING, States

_POLL_SECONDS = 1e-4
"""Seconds between two looks at the states."""
_SLOW = 0.04
"""Fraction of the masks. If fewer become ready between two looks, those that are left count as slow.

The interval is about this fraction of a short step: waiting would cost all rows more than it gives to few.
"""
_LEAST_READY = 0.75
"""Fraction of the masks for which a step waits even if the others are slow."""
_MOST_SLOW = 8
"""Number of slow masks that a step leaves out even if they are more than a quarter of its rows."""


class MaskProgress(ABC):
    """The masks of one step. No other code may use the matcher of a row until the row is done."""

    def __init__(self, states: States) -> None:
        """`states` uint8 [most rows] are changed by those who write the masks. `num_rows` of them are used."""
        self._memory, self.num_rows = states, 0

    @abstractmethod
    def error(self, row: int) -> BaseException:
        """Return why a row failed."""

    @abstractmethod
    def check(self) -> None:
        """Let all rows fail that nobody computes any more. Called while rows are waited for."""

    @property
    def _states(self) -> States:
        return self._memory[: self.num_rows]

    def add(self, count: int) -> range:
        """Use `count` rows more, and return them. They are pending."""
        rows = range(self.num_rows, self.num_rows + count)
        self.num_rows += count
        self._memory[rows.start : rows.stop] = PENDING
        return rows

    def detach(self) -> None:
        """Keep the states of the rows, which are all done: the memory gets the states of another step."""
        assert self.all_done
        self._memory = self._states.copy()

    def is_done(self, row: int) -> bool:
        """Return True if the mask of the row is written, or could not be computed."""
        return bool(self._states[row] != PENDING)

    @property
    def done(self) -> bytes:
        """A snapshot with 1 for each row that is done, else 0."""
        done: bytes = (self._states != PENDING).tobytes()
        return done

    @property
    def all_done(self) -> bool:
        return self._num_done() == len(self._states)

    def failed_rows(self) -> Iterable[int]:
        """Return the rows whose mask could not be computed, so far."""
        rows: list[int] = np.flatnonzero(self._states == FAILED).tolist()
        return rows

    def wait(self, is_due: Callable[[], bool] | None, least: int = 0) -> None:
        """Wait until all rows are done, or until the step is due and only slow rows are left.

        At least `least` rows are done then. With `is_due` None, wait for all rows.
        """
        count, before = len(self._states), -len(self._states)
        enough = max(least, min(int(_LEAST_READY * count), count - _MOST_SLOW))
        while (done := self._num_done()) < count:
            if done - before <= _SLOW * count and done >= enough and is_due is not None and is_due():
                return
            before = done
            self._wait_a_moment()

    def wait_row(self, row: int) -> None:
        """Wait until the row is done."""
        while not self.is_done(row):
            self._wait_a_moment()

    def _num_done(self) -> int:
        return int(np.count_nonzero(self._states))

    def _wait_a_moment(self) -> None:
        time.sleep(_POLL_SECONDS)
        self.check()
