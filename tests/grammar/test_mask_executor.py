"""`MaskExecutor`: masks in threads, of which some are slow. The waits end by events, and have bounds."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest

from tests.grammar.local_matchers import LocalRun
from tests.grammar.slow_matchers import SlowMatcher, slow_matchers
from verl_server.grammar import mask_executor
from verl_server.grammar.mask_executor import MaskExecutor


def started(given: Any, words: Any) -> LocalRun:
    progress = LocalRun(0, words, np.zeros(len(words), dtype=np.uint8))
    progress.add_matchers(given)
    progress.compute(MaskExecutor())
    return progress


def test_other_threads_go_on_when_slow_masks_hold_threads_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_executor, "_THREADS", 4)
    made, given, words = slow_matchers({0, 1, 2}, 40)
    progress = started(given, words)
    for row in range(3, 40):
        progress.wait_row(row)
    assert progress.done == bytes(3) + b"\x01" * 37 and not progress.all_done
    for matcher in made:
        matcher.may_end.set()
    progress.wait(None)
    assert progress.all_done and not progress.errors


def test_more_slow_masks_than_threads_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_executor, "_THREADS", 2)
    made, given, words = slow_matchers({0, 1}, 16)
    progress = started(given, words)
    assert all(matcher.began.wait(20) for matcher in made[:2]) and not any(progress.done)
    made[0].may_end.set()
    for row in range(2, 16):
        progress.wait_row(row)
    assert not progress.is_done(1)
    made[1].may_end.set()
    progress.wait(None)


def test_an_error_of_one_row_is_kept_for_the_row() -> None:
    made, given, words = slow_matchers(set(), 3)
    made[1].error = RuntimeError("index out of bounds")
    progress = started(given, words)
    progress.wait(None)
    assert progress.all_done and list(progress.failed_rows()) == [1] == list(progress.errors)
    assert progress.error(1) is made[1].error


def test_threads_are_woken_for_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few rows wakes few threads."""
    monkeypatch.setattr(mask_executor, "_THREADS", 8)
    names = set()

    class Named(SlowMatcher):
        def write_mask(self, address: int, num_bytes: int) -> None:
            names.add(threading.current_thread().ident)

    given = cast("Any", [Named(may_end=True) for _ in range(4)])
    progress = started(given, slow_matchers(set(), 4)[2])
    progress.wait(None)
    assert len(names) == 1
