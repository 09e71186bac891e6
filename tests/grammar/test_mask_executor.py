"""`MaskExecutor`: masks in threads, of which some are slow. The waits end by events, and have bounds."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest

from verl_server.grammar import mask_executor
from verl_server.grammar.compiler import Matcher
from verl_server.grammar.mask_executor import MaskExecutor

_TIMEOUT = 20


class SlowMatcher:
    """Writes its mask when `may_end` is set."""

    def __init__(self, may_end: bool) -> None:
        self.began, self.may_end, self.error = threading.Event(), threading.Event(), False
        if may_end:
            self.may_end.set()

    def write_mask(self, address: int, num_bytes: int) -> None:
        self.began.set()
        assert self.may_end.wait(_TIMEOUT)
        if self.error:
            raise RuntimeError("index out of bounds")


def matchers(slow: set[int], count: int) -> tuple[list[SlowMatcher], list[Matcher], Any]:
    made = [SlowMatcher(row not in slow) for row in range(count)]
    return made, cast("list[Matcher]", made), np.zeros((count, 4), dtype=np.int32)


def done(run: mask_executor.MaskRun, count: int) -> list[int]:
    return [row for row in range(count) if run.is_done(row)]


def test_other_threads_go_on_when_slow_masks_hold_threads_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_executor, "_THREADS", 4)
    made, given, words = matchers({0, 1, 2}, 40)
    run = MaskExecutor().start(given, words)
    run.wait(lambda: True)
    for row in range(3, 40):
        run.wait_row(row)
    assert done(run, 40) == list(range(3, 40)) and not run.all_done
    for matcher in made:
        matcher.may_end.set()
    run.wait(None)
    assert run.all_done and not run.errors


def test_it_waits_for_slow_rows_while_the_logits_are_computed() -> None:
    made, given, words = matchers({1}, 8)
    answers = iter([False, False, True])

    def is_computed() -> bool:
        if computed := next(answers):
            made[1].may_end.set()
            run.wait_row(1)
        return computed

    run = MaskExecutor().start(given, words)
    run.wait(is_computed)
    assert run.all_done and not list(answers)


def test_it_waits_for_the_least_number_of_rows() -> None:
    made, given, words = matchers({0}, 1)
    threading.Thread(target=lambda: (made[0].began.wait(_TIMEOUT), made[0].may_end.set())).start()
    run = MaskExecutor().start(given, words)
    run.wait(lambda: True, least=1)
    assert run.all_done


def test_most_rows_are_waited_for_even_if_all_threads_are_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_executor, "_THREADS", 2)
    made, given, words = matchers({0, 1, 2}, 16)

    def end_two() -> None:
        for matcher in made[:2]:
            matcher.began.wait(_TIMEOUT)
        for matcher in made[:2]:
            matcher.may_end.set()

    threading.Thread(target=end_two).start()
    run = MaskExecutor().start(given, words)
    run.wait(lambda: True)
    assert len(done(run, 16)) >= 12 and not run.is_done(2)
    made[2].may_end.set()
    run.wait(None)


def test_an_error_of_one_row_is_kept_for_the_row() -> None:
    made, given, words = matchers(set(), 3)
    made[1].error = True
    run = MaskExecutor().start(given, words)
    run.wait(None)
    assert run.all_done and list(run.errors) == [1]
