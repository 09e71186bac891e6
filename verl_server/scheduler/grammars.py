"""`Grammars`: compiles the grammars of requests. `masks` computes which tokens their outputs may continue with.

The `Scheduler` owns it. A request whose grammar is not compiled yet waits here, not in the planner's queue. Threads
compile; equal grammars are compiled once. Text workers have tried out every grammar before, so a compilation ends.

Each running request has a matcher, which advances by the tokens that were collected. So a retraction or a pause does
not concern it. A matcher that fails ends its own request only.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl_server.errors import BadRequestError
from verl_server.grammar.failure import GrammarFailedError
from verl_server.io_struct import GrammarTokenizer
from verl_server.scheduler.request_grammar import RequestGrammar
from verl_server.scheduler.schedule_batch import Req

if TYPE_CHECKING:  # a server without grammars does not load llguidance
    from verl_server.grammar.compiler import GrammarCompiler, Matcher
    from verl_server.scheduler.step_masks import StepMasks

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
        self.masks: StepMasks | None = None
        """None until `load`."""
        self.on_compiled: Callable[[], None] = lambda: None
        """Called in a thread whenever a compilation has ended."""
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        """Compiled grammars, the least recently used first."""
        self._size = 0
        self._compiler: GrammarCompiler | None = None
        self._threads: ThreadPoolExecutor | None = None

    def load(self, message: GrammarTokenizer) -> None:
        """Prepare the tokenizer, which takes a second with a large vocabulary."""
        from verl_server.grammar.compiler import GrammarCompiler
        from verl_server.scheduler.step_masks import StepMasks

        try:
            self._compiler = GrammarCompiler(message.tokenizer, message.eos_token_ids, self._vocab_size)
        except BadRequestError as error:
            self.refusal = str(error)
            logger.info("Requests with a grammar are refused. %s", error)
            return
        eos = [token for token in message.eos_token_ids if 0 <= token < self._vocab_size]
        self.masks = StepMasks(self._compiler.num_words, self._max_rows, eos, self._device)
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
        from verl_server.grammar.compiler import COMPILER_STACK, stack_size
        from verl_server.grammar.mask_executor import MaskExecutor
        from verl_server.grammar.walk import random_outputs

        assert self._compiler is not None
        compiler = self._compiler

        def work() -> Matcher:
            matcher = compiler.compile(grammar)
            executor = MaskExecutor()  # its own, so that the masks of steps do not wait for it
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


def _grammar_of(req: Req) -> RequestGrammar:
    assert req.grammar is not None
    return req.grammar
