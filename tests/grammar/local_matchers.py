"""`LocalMatchers`: the matchers of a scheduler in the test's own process, so that a test can hold or break them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from verl_server.grammar.compiler import GrammarCompiler, Matcher
from verl_server.grammar.mask_executor import MaskExecutor, MaskRun
from verl_server.grammar.mask_memory import Words
from verl_server.grammar.mask_progress import MaskProgress
from verl_server.grammar.matcher_client import MatcherClient, RemoteMatcher


class LocalMatcher(Matcher):
    lost: BaseException | None = None
    compile_seconds = 0.0

    def copy(self) -> LocalMatcher:
        return LocalMatcher(super().copy().inner)


class LocalProgress(MaskProgress):
    """Masks that this process computes."""

    def __init__(self, matchers: Sequence[Matcher], words: Words) -> None:
        self.errors: dict[int, BaseException] = {}
        states = np.zeros(len(matchers), dtype=np.uint8)
        self.run = MaskRun(matchers, range(len(matchers)), words, states, self.errors.__setitem__)
        super().__init__(states, self.errors.__getitem__, lambda: None)


class LocalMatchers(MatcherClient):
    def __init__(
        self, tokenizer: bytes, eos_token_ids: list[int], vocab_size: int, max_rows: int, buffers: int
    ) -> None:
        self.compiler = GrammarCompiler(tokenizer, eos_token_ids, vocab_size)
        self.executor = MaskExecutor()
        self.buffers = np.zeros((buffers, max_rows, self.compiler.num_words), dtype=np.int32)
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

    def consume(self, pairs: Sequence[tuple[Any, int]]) -> list[bool | BaseException]:
        return self.executor.consume(pairs)

    def start(self, matchers: Sequence[Any], buffer: int) -> MaskProgress:
        progress = LocalProgress(matchers, self.words(buffer)[: len(matchers)])
        self.executor.start(progress.run)
        return progress

    def close(self) -> None:
        """There is no process to end."""
