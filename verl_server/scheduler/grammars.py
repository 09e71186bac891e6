"""`Grammars`: compiles the grammars of requests, and computes which tokens their outputs may continue with.

The `Scheduler` owns it. A request whose grammar is not compiled yet waits here, not in the planner's queue. Threads
compile; equal grammars are compiled once. Text workers have tried out every grammar before, so a compilation ends.

Each running request has a matcher, which advances by the tokens that were collected. So a retraction or a pause does
not concern it. A matcher that fails ends its own request only.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from verl_server.errors import BadRequestError
from verl_server.grammar.failure import GrammarFailedError
from verl_server.io_struct import FinishReason, GrammarTokenizer
from verl_server.sampling.spec import TokenMasks
from verl_server.scheduler.request_grammar import RequestGrammar, failed
from verl_server.scheduler.schedule_batch import Req

if TYPE_CHECKING:  # a server without grammars does not load llguidance
    from verl_server.grammar.compiler import GrammarCompiler, MaskExecutor, Matcher, Words

logger = logging.getLogger(__name__)

_THREADS = 2
"""Number of grammars that are compiled at the same time."""
_WARM_SECONDS = 0.25
"""Time for random outputs, which build automata."""
_MOST_BYTES = 2**30
"""Bytes of compiled grammars that are kept, roughly. Grammars of live requests are kept in addition."""
_ENTRY_BYTES = 2**18
"""Bytes that a compiled grammar counts in addition to its measured size, which is rough."""


@dataclass
class _Compiled:
    start: Future[Matcher]
    """A matcher at the start of the output, of which each request takes a copy."""
    size: int


class Grammars:
    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self._vocab_size, self._device, self._max_rows = vocab_size, device, max_rows
        self.refusal: str | None = "This server has no tokenizer for constrained decoding."
        """The reason why requests with a grammar are refused, or None."""
        self.waiting: dict[str, Req] = {}
        """Requests whose grammar is being compiled, by rid."""
        self.on_compiled: Callable[[], None] = lambda: None
        """Called in a thread whenever a compilation has ended."""
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        """Compiled grammars, the least recently used first."""
        self._size = 0
        self._compiler: GrammarCompiler | None = None
        self._executor: MaskExecutor | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._words: torch.Tensor | None = None
        """int32 [max_rows, words] on the host, pinned for CUDA. The step that reads it ends before the next write."""
        self._eos_words = self._eos_shifts = np.zeros(0, dtype=np.int64)
        """Words of a mask that hold the bits of EOS tokens, and the places of the bits in these words."""

    def load(self, message: GrammarTokenizer) -> None:
        """Prepare the tokenizer, which takes a second with a large vocabulary."""
        from verl_server.grammar.compiler import GrammarCompiler, MaskExecutor

        try:
            self._compiler = GrammarCompiler(message.tokenizer, message.eos_token_ids, self._vocab_size)
        except BadRequestError as error:
            self.refusal = str(error)
            logger.info("Requests with a grammar are refused. %s", error)
            return
        self._executor = MaskExecutor()
        eos = np.array([token for token in message.eos_token_ids if 0 <= token < self._vocab_size], dtype=np.int64)
        self._eos_words, self._eos_shifts = eos // 32, eos % 32
        shape = (self._max_rows, self._compiler.num_words)
        self._words = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self.refusal = None

    # -- compilation -----------------------------------------------------------------------------------------

    def attach(self, req: Req, grammar: str, size: int) -> None:
        """Set the grammar of a request. If it must be compiled first, the request waits in `waiting`."""
        entry = self._compiled.get(grammar)
        if entry is None:
            entry = self._compiled[grammar] = _Compiled(self._compile(grammar), size + len(grammar) + _ENTRY_BYTES)
            self._size += entry.size
            self._evict()
        else:
            self._compiled.move_to_end(grammar)
        req.grammar = RequestGrammar(entry.start, sorted(req.stop_ids), req.spec.params.ignore_eos)
        if not entry.start.done():
            self.waiting[req.rid] = req

    def has_compiled(self) -> bool:
        """Return True if a waiting request can leave `waiting`."""
        return any(_grammar_of(req).start.done() for req in self.waiting.values())

    def take_compiled(self) -> list[Req]:
        """Remove and return the requests whose compilation has ended."""
        done = [req for req in self.waiting.values() if _grammar_of(req).start.done()]
        for req in done:
            del self.waiting[req.rid]
        return done

    def _compile(self, grammar: str) -> Future[Matcher]:
        from verl_server.grammar.compiler import COMPILER_STACK, MaskExecutor, stack_size
        from verl_server.grammar.walk import random_outputs

        assert self._compiler is not None
        compiler = self._compiler

        def work() -> Matcher:
            matcher = compiler.compile(grammar)
            executor = MaskExecutor(1)  # its own, so that the masks of steps do not wait for it
            try:
                for _ in random_outputs(matcher, executor, compiler.num_words, time.monotonic, _WARM_SECONDS):
                    pass
            except GrammarFailedError:
                return compiler.compile(grammar)  # the requests will find out
            return matcher

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-compiler")
        with stack_size(COMPILER_STACK):  # for the thread that `submit` may start
            future = self._threads.submit(work)
        future.add_done_callback(lambda _: self.on_compiled())
        return future

    def _evict(self) -> None:
        for grammar in list(self._compiled):
            if self._size <= _MOST_BYTES:
                return
            if self._compiled[grammar].start.done():
                self._size -= self._compiled.pop(grammar).size

    # -- a step ----------------------------------------------------------------------------------------------

    def masks(self, sampled: Sequence[Req]) -> tuple[TokenMasks | None, list[tuple[Req, FinishReason]]]:
        """Return the masks for the rows of a step, and the requests whose matcher failed, each with the reason.

        `sampled` are the requests of the step, of which all earlier tokens were consumed. A request that ended has no
        mask.
        """
        rows = [(row, req) for row, req in enumerate(sampled) if req.grammar is not None and req.row >= 0]
        if not rows:
            return None, []
        assert self._words is not None and self._executor is not None
        words = self._words[: len(rows)]
        bits, grammars = words.numpy(), [_grammar_of(req) for _, req in rows]
        try:
            self._executor.fill([grammar.open() for grammar in grammars], bits)
        except BaseException as error:  # a panic of llguidance is no Exception
            return None, [(req, failed(error)) for _, req in rows]
        failures: list[tuple[Req, FinishReason]] = []
        for (_, req), grammar in zip(rows, grammars, strict=True):
            if (reason := grammar.failure()) is not None:
                failures.append((req, reason))
        # Few rows of a step may end.
        for place in np.flatnonzero(((bits[:, self._eos_words] >> self._eos_shifts) & 1).any(axis=1)):
            self._adjust_ends(bits[place], grammars[place])
        return TokenMasks([row for row, _ in rows], words), failures

    def consume(self, pairs: Sequence[tuple[Req, int]]) -> None:
        """Advance the matchers of requests by one token each. `RequestGrammar.end` returns the outcome."""
        if not pairs:
            return
        assert self._executor is not None
        try:
            self._executor.consume([(_grammar_of(req).open(), token) for req, token in pairs])
        except BaseException as error:  # a panic of llguidance is no Exception
            for req, _ in pairs:
                _grammar_of(req).error = error

    def _adjust_ends(self, bits: Words, grammar: RequestGrammar) -> None:
        """Set which tokens may end the output, in the mask of a row that allows EOS."""
        stops = np.array(grammar.stop_ids, dtype=np.int64)
        np.bitwise_or.at(bits, stops // 32, _bit(stops))
        if grammar.ignore_eos:
            others = bits.copy()
            np.bitwise_and.at(others, self._eos_words, ~_bit(self._eos_shifts))
            if others.any():
                bits[:] = others


def _bit(tokens: npt.NDArray[np.int64]) -> Words:
    """Return the bit of each token in its word of a mask."""
    return np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32)).view(np.int32)


def _grammar_of(req: Req) -> RequestGrammar:
    assert req.grammar is not None
    return req.grammar
