"""`MaskProgress`: how long a step waits for its masks. The states are changed while the wait looks at them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from verl_server.grammar.mask_memory import FAILED, WRITTEN
from verl_server.grammar.mask_progress import MaskProgress


class Shared(MaskProgress):
    """The rows of a step in memory that others write."""

    def error(self, row: int) -> BaseException:
        return RuntimeError(str(row))

    def check(self) -> None:
        """All rows are written at some time."""


class Scripted(Shared):
    """Writes the masks of `script[i]` rows at the i-th look, and then none."""

    def __init__(self, rows: int, script: list[int]) -> None:
        super().__init__(np.zeros(rows + 2, dtype=np.uint8))
        self.add(rows)
        self.script, self.looks = script, 0

    def check(self) -> None:
        self.looks += 1
        assert self.looks < 100, "nothing ends this wait"
        if self.script:
            left = np.flatnonzero(self._states == 0)[: self.script.pop(0)]
            self._states[left] = WRITTEN


def due_after(looks: int, progress: Scripted) -> Callable[[], bool]:
    return lambda: progress.looks >= looks


def test_it_waits_for_all_rows_until_the_step_is_due() -> None:
    progress = Scripted(40, [30, 5, 0, 0, 0, 5])
    progress.wait(due_after(100, progress))
    assert progress.all_done


def test_slow_rows_are_left_when_the_step_is_due() -> None:
    progress = Scripted(40, [35, 0, 0, 5])
    progress.wait(due_after(0, progress))
    assert progress.done.count(1) == 35 and progress.looks == 2, "the second look found no other mask"


def test_rows_that_are_being_written_are_waited_for_though_the_step_is_due() -> None:
    """Fewer than one of 25 rows in the time between two looks are no reason to wait."""
    progress = Scripted(40, [31, 2, 2, 1, 0, 4])
    progress.wait(due_after(0, progress))
    assert progress.done.count(1) == 36
    few = Scripted(12, [9, 1, 1, 0, 1])
    few.wait(due_after(0, few))
    assert few.done.count(1) == 11


@pytest.mark.parametrize(("rows", "enough"), [(40, 30), (16, 8), (9, 1), (8, 0)])
def test_most_rows_are_waited_for_though_the_step_is_due(rows: int, enough: int) -> None:
    """A step of many rows leaves out at most a quarter, and a step of few rows at most eight."""
    progress = Scripted(rows, [enough - 1, 0, 0, 1] if enough else [])
    progress.wait(due_after(0, progress))
    assert progress.done.count(1) == enough


def test_it_waits_for_the_least_number_of_rows() -> None:
    progress = Scripted(4, [0, 0, 1])
    progress.wait(due_after(0, progress), least=1)
    assert progress.done.count(1) == 1


def test_without_a_due_time_all_rows_are_waited_for() -> None:
    progress = Scripted(4, [0, 3, 0, 0, 1])
    progress.wait(None)
    assert progress.all_done


def test_one_row_is_waited_for() -> None:
    progress = Scripted(3, [1, 0, 0, 1])
    progress.wait_row(1)
    assert [progress.is_done(row) for row in range(3)] == [True, True, False]


def test_rows_that_failed_are_done_and_have_an_error() -> None:
    progress = Scripted(3, [])
    progress._states[1] = FAILED
    assert progress.is_done(1) and list(progress.failed_rows()) == [1] and str(progress.error(1)) == "1"


def test_rows_are_added_while_others_are_written() -> None:
    """The states of an earlier step are no states of the rows."""
    progress = Shared(np.full(4, WRITTEN, dtype=np.uint8))
    assert progress.all_done and progress.add(2) == range(2) and progress.done == bytes(2)
    progress._states[1] = WRITTEN
    assert progress.add(1) == range(2, 3) and progress.done == b"\x00\x01\x00"


def test_the_states_of_a_step_outlast_the_next_use_of_its_memory() -> None:
    """A late mask is used by a later step, when the memory may have the states of another step already."""
    states = np.zeros(4, dtype=np.uint8)
    first, second = Shared(states), Shared(states)
    first.add(3)
    states[:3] = WRITTEN, FAILED, WRITTEN
    first.detach()
    second.add(3)
    assert first.all_done and list(first.failed_rows()) == [1] and second.done == bytes(3)
    states[:3] = FAILED, WRITTEN, WRITTEN
    assert list(first.failed_rows()) == [1] and list(second.failed_rows()) == [0]
