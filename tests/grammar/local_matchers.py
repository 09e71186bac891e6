"""`LocalMatchers`: the matchers of a scheduler in the test's own process, so that a test can hold or break them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from verl_server.grammar.compiler import GrammarCompiler, Matcher
from verl_server.grammar.mask_executor import MaskExecutor, MaskRun
from verl_server.grammar.mask_memory import WRITTEN, States, Words
from verl_server.grammar.mask_progress import MaskProgress
from verl_server.grammar.matcher_client import MatcherClient, RemoteMatcher


class LocalMatcher(Matcher):
    lost: BaseException | None = None
    compile_seconds = 0.0

    def copy(self) -> LocalMatcher:
        return LocalMatcher(super().copy().inner)


class LocalRun(MaskProgress):
    """Masks that this process computes when the rest of the step is started."""

    def __init__(self, buffer: int, words: Words, states: States) -> None:
        self.buffer, self.words = buffer, words
        self.errors: dict[int, BaseException] = {}
        self.matchers: list[Matcher] = []
        self.ended: set[int] = set()
        """Rows that need no mask, because their token ended the output."""
        super().__init__(states)

    def error(self, row: int) -> BaseException:
        return self.errors[row]

    def check(self) -> None:
        """This process computes all rows."""

    def add_matchers(self, matchers: Sequence[Matcher]) -> range:
        self.matchers += matchers
        return self.add(len(matchers))

    def compute(self, executor: MaskExecutor) -> None:
        rows = [row for row in range(self.num_rows) if row not in self.ended]
        matchers = [self.matchers[row] for row in rows]
        executor.start(MaskRun(matchers, rows, self.words, self._memory, self.errors.__setitem__))

    def compute_row(self, row: int) -> None:
        """Compute a row in this thread."""
        MaskRun([self.matchers[row]], [row], self.words, self._memory, self.errors.__setitem__).compute()

    def end(self, row: int) -> None:
        self.ended.add(row)
        self._memory[row] = WRITTEN


class LocalMatchers(MatcherClient):
    def __init__(
        self, tokenizer: bytes, eos_token_ids: list[int], vocab_size: int, max_rows: int, buffers: int
    ) -> None:
        self.compiler = GrammarCompiler(tokenizer, eos_token_ids, vocab_size)
        self.executor = MaskExecutor()
        self.buffers = np.zeros((buffers, max_rows, self.compiler.num_words), dtype=np.int32)
        self.states = np.zeros((buffers, max_rows), dtype=np.uint8)
        self.before_compilation: Callable[[str], object] = lambda grammar: None

    def compile(self, grammar: str) -> RemoteMatcher:
        self.before_compilation(grammar)
        start = time.thread_time()
        matcher = LocalMatcher(self.compiler.compile(grammar).inner)
        matcher.compile_seconds = time.thread_time() - start
        return cast("RemoteMatcher", matcher)

    def words(self, buffer: int) -> Words:
        words: Words = self.buffers[buffer]
        return words

    def begin(self, buffer: int) -> Any:
        return LocalRun(buffer, self.words(buffer), self.states[buffer])

    def consume(
        self, pairs: Sequence[tuple[Any, int]], run: Any, early: Sequence[bool]
    ) -> Callable[[], dict[int, BaseException | None]]:
        outcomes = self.executor.consume(pairs)
        if run is not None:
            places = [place for place, is_early in enumerate(early) if is_early]
            for place, row in zip(places, run.add_matchers([pairs[place][0] for place in places]), strict=True):
                if outcomes[place] is not False:
                    run.end(row)
        ends = {place: None if outcome is True else outcome for place, outcome in enumerate(outcomes) if outcome}
        return lambda: ends

    def start(self, matchers: Sequence[Any], run: Any) -> range:
        rows: range = run.add_matchers(matchers)
        run.compute(self.executor)
        return rows

    def close(self) -> None:
        """There is no process to end."""
