"""`StepMasks`: computes which tokens the rows of a step may sample, and advances the matchers by sampled tokens.

`Grammars` makes it. The `StepPipeline` calls `start` and `finish` between the forward pass of a step and its sampling,
and sends and plans between these calls, while threads compute. The `Scheduler` calls `consume` for each collected step.

Most masks take some 7 microseconds to compute, and a few take milliseconds. A wait for the slow masks would delay all
other rows. So the step samples no token for a row whose mask is late, and a later step uses the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from verl_server.grammar.mask_executor import MaskExecutor, MaskRun, Words
from verl_server.messages.io_struct import FinishReason
from verl_server.sampling.spec import TokenMasks
from verl_server.scheduler.request_grammar import LateMask, RequestGrammar
from verl_server.scheduler.schedule_batch import Req

_MOST_BUFFERS = 4
"""The most buffers. Each buffer has the masks of all rows. Late masks may occupy all buffers except one."""


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
    words: torch.Tensor
    """int32 [max_rows, words] on the host, pinned for CUDA. The step that reads it ends before the next write."""
    run: MaskRun | None = None
    """The run that writes into the buffer."""
    late: list[LateMask] = field(default_factory=list)
    """The late masks in the buffer."""

    @property
    def is_free(self) -> bool:
        return self.run is None or self.run.all_done


@dataclass
class StartedMasks:
    """Masks that threads compute: from `StepMasks.start` to `StepMasks.finish`."""

    rows: list[tuple[int, Req, RequestGrammar]]
    """(row of the step, request, its grammar). The rows without a late mask of an earlier step come first."""
    num_fresh: int
    """Number of rows without a late mask of an earlier step. Threads compute the masks of these rows."""
    has_free: bool
    """True if a row of the step has no grammar."""
    buffer: _Buffer
    words: torch.Tensor
    """int32 [len(rows), words]: the part of the buffer that the masks are written into."""


class StepMasks:
    def __init__(self, num_words: int, max_rows: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        """`num_words` is the number of words of a mask. `max_rows` is the most rows of a step."""
        self.executor = MaskExecutor()
        self._shape, self._pinned = (max_rows, num_words), device.type == "cuda"
        self._buffers: list[_Buffer] = []
        eos = np.array(eos_token_ids, dtype=np.int64)
        self._eos_words, self._eos_shifts = eos // 32, eos % 32
        """Words of a mask that hold the bits of EOS tokens, and the places of the bits in these words."""

    def start(self, sampled: Sequence[Req]) -> StartedMasks | None:
        """Start to compute the masks for the rows of a step in threads. Return None if no row needs a mask.

        `sampled` are the requests of the step. Their earlier tokens must have been consumed. A request that ended has
        no mask. Until `finish`, no request of `sampled` may end, because the matchers belong to the threads.
        """
        fresh: list[tuple[int, Req, RequestGrammar]] = []
        late: list[tuple[int, Req, RequestGrammar]] = []
        has_free = False
        for row, req in enumerate(sampled):
            if req.row >= 0 and req.grammar is not None:
                (fresh if req.grammar.late is None else late).append((row, req, req.grammar))
            elif req.row >= 0:
                has_free = True
        if not fresh and not late:
            return None
        buffer = self._take_buffer()
        words = buffer.words[: len(fresh) + len(late)]
        if fresh:
            matchers = [grammar.open() for _, _, grammar in fresh]
            buffer.run = self.executor.start(matchers, words.numpy()[: len(fresh)])
        return StartedMasks(fresh + late, len(fresh), has_free, buffer, words)

    def finish(self, started: StartedMasks | None, is_computed: Callable[[], bool] | None) -> MaskedStep:
        """Wait for the masks that `start` started.

        `is_computed` returns True when the logits of the step are computed. A mask that is not ready at that time is
        late. If `is_computed` is None, no mask is late.
        """
        step = MaskedStep(None, [], [])
        if started is None:
            return step
        rows, num_fresh, buffer = started.rows, started.num_fresh, started.buffer
        bits: Words = started.words.numpy()
        ready = bytearray(len(rows))
        if num_fresh:
            assert buffer.run is not None
            # A step without any token would be a waste.
            buffer.run.wait(is_computed, least=0 if started.has_free else 1)
            ready[:num_fresh] = buffer.run.done
            buffer.late = _mark(buffer.run, [grammar for _, _, grammar in rows[:num_fresh]], bits, ready)
        waits = is_computed is None or (not num_fresh and not started.has_free)
        for place in range(num_fresh, len(rows)):
            ready[place] = _take_late(rows[place][2], bits[place], wait=waits)
        for is_ready, (_, req, grammar) in zip(ready, rows, strict=True):
            if not is_ready:
                step.late.append(req)
            elif (reason := grammar.failure()) is not None:
                step.failures.append((req, reason))
        # Few rows of a step may end.
        ends = ((bits[:, self._eos_words] >> self._eos_shifts) & 1).any(axis=1)
        for place in np.flatnonzero(ends & np.frombuffer(ready, dtype=bool)).tolist():
            self._adjust_ends(bits[place], rows[place][2])
        step.masks = TokenMasks([row for row, _, _ in rows], started.words)
        return step

    def consume(self, pairs: Sequence[tuple[RequestGrammar, int]]) -> None:
        """Advance the matcher of each grammar by its token. Then `RequestGrammar.end` says if its request ends."""
        if not pairs:
            return
        try:
            self.executor.consume([(grammar.open(), token) for grammar, token in pairs])
        except BaseException as error:  # a panic of llguidance is no Exception
            for grammar, _ in pairs:
                grammar.error = error

    def _take_buffer(self) -> _Buffer:
        """Return a buffer that no run writes into. If late masks occupy all buffers, wait for the oldest late mask."""
        for buffer in self._buffers:
            if buffer.is_free:
                break
        else:
            if len(self._buffers) < _MOST_BUFFERS:
                buffer = _Buffer(torch.zeros(self._shape, dtype=torch.int32, pin_memory=self._pinned))
            else:
                buffer = self._buffers[0]
                assert buffer.run is not None
                buffer.run.wait(None)
        self._buffers = [other for other in self._buffers if other is not buffer] + [buffer]
        for late in buffer.late:  # their requests may use them much later
            late.words = late.words.copy()
        buffer.late = []
        return buffer

    def _adjust_ends(self, bits: Words, grammar: RequestGrammar) -> None:
        """Set which tokens may end the output, in the mask of a row that allows EOS."""
        stops = np.array(grammar.stop_ids, dtype=np.int64)
        np.bitwise_or.at(bits, stops // 32, _bit(stops))
        if grammar.ignore_eos:
            others = bits.copy()
            np.bitwise_and.at(others, self._eos_words, ~_bit(self._eos_shifts))
            if others.any():
                bits[:] = others


def _mark(run: MaskRun, grammars: list[RequestGrammar], bits: Words, ready: bytearray) -> list[LateMask]:
    """Set and return the `late` masks of the rows of the run that are not `ready`. Record the errors of the others."""
    late = []
    for row, grammar in enumerate(grammars):
        if not ready[row]:
            grammar.late = LateMask(run, row, bits[row])
            late.append(grammar.late)
    for row, error in list(run.errors.items()):  # threads may still add to it
        grammars[row].error = error
    return late


def _take_late(grammar: RequestGrammar, bits: Words, *, wait: bool) -> bool:
    """Copy the late mask of a row into `bits`. Return False if it is still not ready."""
    late = grammar.late
    assert late is not None
    if wait:
        late.run.wait_row(late.row)
    if not late.run.is_done(late.row):
        return False
    bits[:], grammar.late = late.words, None
    grammar.error = late.run.errors.get(late.row)
    return True


def _bit(tokens: npt.NDArray[np.int64]) -> Words:
    """Return an int32 for each token in which only the token's bit of its mask word is set."""
    return np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32)).view(np.int32)
