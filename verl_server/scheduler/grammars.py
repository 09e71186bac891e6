"""`Grammars`: compiles the grammars of requests. Its `masks` computes the allowed next tokens of their outputs.

The `Scheduler` owns it. A request whose grammar is not compiled yet waits here, not in the planner's queue. Threads
wait for the processes that compile. Text workers have tried out every grammar before, so a compilation ends.

Each running request has a matcher, which advances by the tokens that were collected. So a retraction or a pause does
not change the matcher. If a matcher fails, only its own request ends.

Copies of a matcher share automata under one lock, so that their masks are computed one after the other, and a slow mask
delays them all. A typical compilation takes a millisecond. So each request's grammar is compiled anew, unless an
earlier request left an idle matcher. Only the requests of a grammar that is expensive to compile use copies of one
matcher.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from verl_server.grammar.matcher_client import MatcherClient, RemoteMatcher
from verl_server.messages.io_struct import GrammarTokenizer
from verl_server.scheduler.request_grammar import RequestGrammar
from verl_server.scheduler.schedule_batch import Req
from verl_server.scheduler.step_masks import MOST_BUFFERS, StepMasks

_THREADS = 4
"""Number of grammars that are compiled at the same time."""
_MOST_BYTES = 2**30
"""The most bytes of compiled grammars that are kept, roughly. Grammars of live requests are not counted."""
_MATCHER_BYTES = 2**18
"""Bytes that are added to the measured size of a matcher, because the measurement is rough."""
_MOST_SECONDS = 0.02
"""Seconds of processor time. A grammar that takes more time to compile is compiled only once."""
_MOST_SIZE = 2**22
"""Bytes. A grammar that takes more memory is compiled only once."""
_LONGEST = 4096
"""Number of tokens. The matcher of a longer output is not used again, because it keeps the memory of that output."""


@dataclass
class _Compiled:
    size: int
    """Bytes of a matcher, roughly."""
    idle: list[RemoteMatcher] = field(default_factory=list)
    """Idle matchers at the start of the output. A matcher serves one request at a time."""
    original: RemoteMatcher | None = None
    """The matcher of an expensive grammar. Each request uses a copy of it."""


class Grammars:
    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self._vocab_size, self._device, self._max_rows = vocab_size, device, max_rows
        self.refusal: str | None = "This server has no tokenizer for constrained decoding."
        """The reason why requests with a grammar are refused, or None."""
        self.waiting: dict[str, Req] = {}
        """Requests whose grammar is being compiled, by rid."""
        self.masks: StepMasks | None = None
        """Computes the masks of steps, and advances the matchers. None until `load`."""
        self.on_compiled: Callable[[], None] = lambda: None
        """Called in a thread whenever a compilation has ended."""
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        """Compiled grammars, the least recently used first."""
        self._size = 0
        self._ending: list[RequestGrammar] = []
        """Grammars of requests that ended, whose matchers may be used again."""
        self.make_matchers: Callable[[bytes, list[int], int, int, int], MatcherClient] = MatcherClient
        """Makes the client of the processes of the matchers, which start with the first grammars."""
        self._matchers: MatcherClient | None = None
        self._threads: ThreadPoolExecutor | None = None

    def load(self, message: GrammarTokenizer) -> None:
        """Accept grammars from now on, for this tokenizer."""
        eos = [token for token in message.eos_token_ids if 0 <= token < self._vocab_size]
        self._matchers = self.make_matchers(message.tokenizer, eos, self._vocab_size, self._max_rows, MOST_BUFFERS)
        self.masks = StepMasks(self._matchers, eos, self._device)
        self.refusal = None

    def close(self) -> None:
        """End the processes of the matchers, if there are any. Idempotent."""
        if self._matchers is not None:
            self._matchers.close()

    # -- compilation -----------------------------------------------------------------------------------------

    def attach(self, req: Req, grammar: str, size: int) -> None:
        """Set the grammar of a request. If it must be compiled first, the request waits in `waiting`.

        `size` is the number of bytes that the compilation took when the grammar was tried out.
        """
        self._take_back()
        entry = self._compiled.get(grammar)
        if entry is None:
            entry = self._compiled[grammar] = _Compiled(size + len(grammar) + _MATCHER_BYTES)
            self._size += entry.size
            self._evict()
        self._compiled.move_to_end(grammar)
        start: Future[RemoteMatcher]
        matcher = self._take_idle(entry)
        if matcher is not None:
            start = Future()
            start.set_result(matcher)
        else:
            start = self._compile(grammar, entry)
        req.grammar = RequestGrammar(grammar, start, sorted(req.stop_ids), req.spec.params.ignore_eos)
        if not start.done():
            self.waiting[req.rid] = req

    def _take_idle(self, entry: _Compiled) -> RemoteMatcher | None:
        """Remove and return an idle matcher. Those that are lost are removed on the way."""
        while entry.idle:
            matcher = entry.idle.pop()
            self._size -= entry.size
            if matcher.lost is None:
                return matcher
        return None

    def release(self, req: Req) -> None:
        """Keep the matcher of a request that ended for a later request with the same grammar."""
        if req.grammar is not None and len(req.output_ids) <= _LONGEST:
            self._ending.append(req.grammar)

    def _take_back(self) -> None:
        """Keep the matchers of requests that ended, except those whose mask is still being computed."""
        ending, self._ending = self._ending, []
        for grammar in ending:
            entry = self._compiled.get(grammar.source)
            if entry is None or len(entry.idle) >= self._max_rows:
                continue
            if grammar.is_busy():
                self._ending.append(grammar)
            elif (matcher := grammar.take_back()) is not None:
                entry.idle.append(matcher)
                self._size += entry.size
        self._evict()

    def has_compiled(self) -> bool:
        """Return True if a waiting request can leave `waiting`."""
        return any(_grammar_of(req).start.done() for req in self.waiting.values())

    def take_compiled(self) -> list[Req]:
        """Remove and return the requests whose compilation has ended."""
        done = [req for req in self.waiting.values() if _grammar_of(req).start.done()]
        for req in done:
            del self.waiting[req.rid]
        return done

    def _compile(self, grammar: str, entry: _Compiled) -> Future[RemoteMatcher]:
        assert self._matchers is not None
        matchers = self._matchers

        def work() -> RemoteMatcher:
            if entry.original is not None and entry.original.lost is None:
                return entry.original.copy()
            matcher = matchers.compile(grammar)
            if matcher.compile_seconds > _MOST_SECONDS or entry.size > _MOST_SIZE:
                entry.original = matcher
                return matcher.copy()
            return matcher

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-compiler")
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self.on_compiled())
        return future

    def _evict(self) -> None:
        """Drop grammars with their idle matchers, the least recently used first. The newest one stays."""
        while self._size > _MOST_BYTES and len(self._compiled) > 1:
            _, entry = self._compiled.popitem(last=False)
            self._size -= (1 + len(entry.idle)) * entry.size


def _grammar_of(req: Req) -> RequestGrammar:
    assert req.grammar is not None
    return req.grammar
