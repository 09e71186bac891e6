"""Matchers whose masks take as long as a test wants."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np

from verl_server.grammar.compiler import Matcher
from verl_server.grammar.mask_memory import Words

_TIMEOUT = 20


class SlowMatcher:
    """Writes its mask when `may_end` is set."""

    def __init__(self, may_end: bool) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        """Raised instead of writing a mask."""
        if may_end:
            self.may_end.set()

    def write_mask(self, address: int, num_bytes: int) -> None:
        self.began.set()
        assert self.may_end.wait(_TIMEOUT)
        if self.error is not None:
            raise self.error

    def check(self) -> None:
        """The matcher did not fail."""


def slow_matchers(slow: set[int], count: int) -> tuple[list[SlowMatcher], list[Matcher], Words]:
    made = [SlowMatcher(row not in slow) for row in range(count)]
    words: Any = np.zeros((count, 4), dtype=np.int32)
    return made, cast("list[Matcher]", made), words
