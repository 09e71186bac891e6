"""`StepMasks`: computes which tokens the rows of a step may sample, and advances the matchers by sampled tokens.

`Grammars` makes it. The `StepPipeline` calls `start` and `finish` between the forward pass of a step and its sampling,
and sends and plans between these calls, while the processes of the matchers compute. The `Scheduler` calls `consume`
for each collected step.

Most masks take some 7 microseconds to compute, and a few take milliseconds. A wait for the slow masks would delay all
other rows. So the step samples no token for a row whose mask is late, and a later step uses the mask. When `consume`
advances matchers, it also starts their masks for the step that was launched meanwhile, so that they are computed while
the scheduler processes the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from verl_server.grammar.mask_memory import Words
from verl_server.grammar.matcher_client import MatcherClient, RemoteRun
from verl_server.messages.io_struct import FinishReason
from verl_server.sampling.spec import TokenMasks
from verl_server.scheduler.request_grammar import LateMask, RequestGrammar, failed
from verl_server.scheduler.schedule_batch import Req

logger = logging.getLogger(__name__)

MOST_BUFFERS = 4
"""The most buffers. Each buffer has the masks of all rows. Late masks may occupy all buffers except one."""


Outcomes = Callable[[], list[tuple[RequestGrammar, FinishReason]]]
"""Waits until tokens are consumed, and returns which requests end with theirs: (grammar, reason)."""

Row = tuple[int, Req, RequestGrammar]
"""(row of the step, request, its grammar)"""


@dataclass
class MaskedStep:
    """The masks of one step, and the requests that got no mask, because it is late or because their matcher failed."""

    masks: TokenMasks | None
    failures: list[tuple[Req, FinishReason]]
    """Requests whose matcher failed."""
    late: list[Req]
    """Requests for which the step must not sample a token. Their rows in `masks` are undefined."""


@dataclass
class _Buffer:
    number: int
    """Place of the buffer in the memory that the processes of the matchers write."""
    words: torch.Tensor
    """int32 [max_rows, words] on the host, pinned for CUDA. The step that reads it ends before the next write."""
    run: RemoteRun | None = None
    """The masks that are written into the buffer."""
    late: list[LateMask] = field(default_factory=list)
    """The late masks in the buffer."""

    def begin(self, matchers: MatcherClient) -> RemoteRun:
        """Let the buffer have the masks of another step. It is free.

        Its late masks stay what they are, because their requests may use them much later.
        """
        if self.run is not None:
            self.run.detach()
        for late in self.late:
            late.words = late.words.copy()
        self.late = []
        self.run = matchers.begin(self.number)
        return self.run

    @property
    def is_free(self) -> bool:
        return self.run is None or self.run.all_done


@dataclass
class StartedMasks:
    """Masks that are being computed: from `StepMasks.start` to `StepMasks.finish`."""

    rows: list[Row]
    """First the rows whose masks are computed now, then those with a late mask of an earlier step."""
    has_free: bool
    """True if a row of the step has no grammar."""
    run: RemoteRun
    """The masks that are computed now, of the first rows."""
    buffer: _Buffer
    words: torch.Tensor
    """int32 [len(rows), words]: the part of the buffer that the masks are written into."""


class StepMasks:
    def __init__(self, matchers: MatcherClient, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self.matchers = matchers
        self._is_pinned = device.type == "cuda"
        self._buffers: list[_Buffer] = []
        self._next: set[RequestGrammar] | None = None
        """Grammars of the next step, if it is known, without those that have a late mask."""
        self._begun: _Buffer | None = None
        """The buffer with the masks of the next step that were started when its tokens were consumed."""
        eos = np.array(eos_token_ids, dtype=np.int64)
        self._eos_words, self._eos_shifts = eos // 32, eos % 32
        """Words of a mask that hold the bits of EOS tokens, and the places of the bits in these words."""

    def expect(self, sampled: Sequence[Req]) -> None:
        """Let `consume` start the masks of a step at once. `sampled` are its requests, for which `start` is called."""
        self._begun = None  # that of a step that failed
        self._next = {req.grammar for req in sampled if req.grammar is not None and req.grammar.late is None}

    def consume(self, pairs: Sequence[tuple[RequestGrammar, int]]) -> Outcomes:
        """Advance the matcher of each grammar by its token.

        Return a function that waits until that is done, and returns which requests end, and why.
        """
        if not pairs:
            return lambda: []
        run, early = None, [False] * len(pairs)
        if self._next is not None:
            self._begun = self._take_buffer()
            run = self._begun.begin(self.matchers)
            early = [grammar in self._next for grammar, _ in pairs]
        wait = self.matchers.consume([(grammar.open(), token) for grammar, token in pairs], run, early)
        if run is not None:
            started = (grammar for (grammar, _), is_early in zip(pairs, early, strict=True) if is_early)
            for place, grammar in enumerate(started):
                grammar.place = run, place

        def outcomes() -> list[tuple[RequestGrammar, FinishReason]]:
            ends = []
            for place, error in wait().items():
                grammar, token = pairs[place]
                grammar.error = error
                ends.append((grammar, FinishReason(type="stop", matched=token) if error is None else failed(error)))
            return ends

        return outcomes

    def start(self, sampled: Sequence[Req]) -> StartedMasks | None:
        """Start to compute the masks for the rows of a step. Return None if no row needs a mask.

        `sampled` are the requests of the step. Their earlier tokens must have been consumed. A request that ended needs
        no mask, but has a row if `consume` started it. Until `finish`, no request of `sampled` may end, because the
        matchers are in use.
        """
        begun, self._begun, self._next = self._begun, None, None
        run = None if begun is None else begun.run
        early: list[Row | None] = [None] * (0 if run is None else run.num_rows)
        fresh: list[Row] = []
        late: list[Row] = []
        has_free = False
        for row, req in enumerate(sampled):
            grammar = req.grammar
            if grammar is None:
                has_free = has_free or req.row >= 0
            elif run is not None and grammar.place is not None and grammar.place[0] is run:
                early[grammar.place[1]] = row, req, grammar
            elif req.row >= 0:
                (fresh if grammar.late is None else late).append((row, req, grammar))
        rows = [row for row in early if row is not None] + fresh + late
        if not rows:
            return None
        assert None not in early, "a mask was started for a request that the step does not have"
        buffer = self._take_buffer() if begun is None else begun
        run = buffer.begin(self.matchers) if run is None else run
        for place, (_, _, grammar) in zip(
            self.matchers.start([grammar.open() for _, _, grammar in fresh], run), fresh, strict=True
        ):
            grammar.place = run, place
        return StartedMasks(rows, has_free, run, buffer, buffer.words[: len(rows)])

    def finish(self, started: StartedMasks | None, is_due: Callable[[], bool] | None) -> MaskedStep:
        """Wait for the masks that `start` started.

        `is_due` returns True when the device waits for the sampling of the step, or soon will. A mask that is not ready
        at that time is late. If `is_due` is None, no mask is late.
        """
        step = MaskedStep(None, [], [])
        if started is None:
            return step
        rows, run = started.rows, started.run
        bits: Words = started.words.numpy()
        ready = bytearray(len(rows))
        if run.num_rows:
            # A step without any token would be a waste.
            run.wait(is_due, least=0 if started.has_free else 1)
            ready[: run.num_rows] = run.done
            for place in run.failed_rows():
                if ready[place]:  # a row that failed meanwhile is late
                    rows[place][2].error = run.error(place)
        waits = is_due is None or (not run.num_rows and not started.has_free)
        for place in range(run.num_rows, len(rows)):
            ready[place] = _take_late(rows[place][2], bits[place], wait=waits)
        for place, (_, req, grammar) in enumerate(rows):
            if req.row < 0:
                continue
            if not ready[place]:
                step.late.append(req)
                if place < run.num_rows:
                    grammar.late = LateMask(run, place, bits[place])
                    started.buffer.late.append(grammar.late)
            elif grammar.error is not None:
                step.failures.append((req, failed(grammar.error)))
        # Few rows of a step may end.
        ends = ((bits[:, self._eos_words] >> self._eos_shifts) & 1).any(axis=1)
        for place in np.flatnonzero(ends & np.frombuffer(ready, dtype=bool)).tolist():
            self._adjust_ends(bits[place], rows[place][2])
        step.masks = TokenMasks([row for row, _, _ in rows], started.words)
        return step

    def _take_buffer(self) -> _Buffer:
        """Return a buffer that no run writes into. If late masks occupy all buffers, wait for the oldest late mask."""
        for buffer in self._buffers:
            if buffer.is_free:
                break
        else:
            if len(self._buffers) < MOST_BUFFERS:
                buffer = self._open_buffer(len(self._buffers))
            else:
                buffer = self._buffers[0]
                assert buffer.run is not None
                buffer.run.wait(None)
        self._buffers = [other for other in self._buffers if other is not buffer] + [buffer]
        return buffer

    def _open_buffer(self, number: int) -> _Buffer:
        words = torch.from_numpy(self.matchers.words(number))
        if self._is_pinned:
            code = torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, 0)  # type: ignore[no-untyped-call]
            if code != 0:
                logger.warning("The masks of grammars cannot be pinned (CUDA error %s): steps wait for copies.", code)
        return _Buffer(number, words)

    def _adjust_ends(self, bits: Words, grammar: RequestGrammar) -> None:
        """Set which tokens may end the output, in the mask of a row that allows EOS."""
        stops = np.array(grammar.stop_ids, dtype=np.int64)
        np.bitwise_or.at(bits, stops // 32, _bit(stops))
        if grammar.ignore_eos:
            others = bits.copy()
            np.bitwise_and.at(others, self._eos_words, ~_bit(self._eos_shifts))
            if others.any():
                bits[:] = others


def _take_late(grammar: RequestGrammar, bits: Words, *, wait: bool) -> bool:
    """Copy the late mask of a row into `bits`. Return False if it is still not ready."""
    late = grammar.late
    assert late is not None
    if wait:
        late.run.wait_row(late.row)
    else:
        late.run.check()
    if not late.run.is_done(late.row):
        return False
    bits[:], grammar.late = late.words, None
    if late.row in late.run.failed_rows():
        grammar.error = late.run.error(late.row)
    return True


def _bit(tokens: npt.NDArray[np.int64]) -> Words:
    """Return an int32 for each token in which only the token's bit of its mask word is set."""
    return np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32)).view(np.int32)
