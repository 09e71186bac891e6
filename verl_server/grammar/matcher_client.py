"""`MatcherClient`: the matchers of a scheduler's requests, which are in processes of their own.

`Grammars` owns it. The first compilations start the processes. Threads that compile call `compile` and
`RemoteMatcher.copy`, and may wait there. The main thread calls `consume` and `start` for each step.

If a process ends, or does not answer, the requests that have a matcher in it end with an error, and the next
compilation starts another one. Other requests do not notice.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_server.grammar.mask_memory import FAILED, PENDING, MaskLayout, MaskMemory, States, Words
from verl_server.grammar.mask_progress import MaskProgress
from verl_server.grammar.matcher_child import STEP_SECONDS, MatcherChild
from verl_server.grammar.matcher_messages import Compile, Copy

_PROCESSES = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""Number of processes. Threads of one process take turns at its interpreter's lock, those of several do not."""


class RemoteMatcher:
    """The state of a grammar in the process: what `compiler.Matcher` is there."""

    def __init__(self, child: MatcherChild) -> None:
        self.child, self.number = child, next(child.numbers)
        self.compile_seconds = 0.0
        """Seconds of processor time that the compilation took."""

    def __del__(self) -> None:
        self.child.dropped.append(self.number)

    @property
    def lost(self) -> BaseException | None:
        """The reason why the matcher cannot be used any more: its process has ended."""
        self.child.check()
        return self.child.lost

    def copy(self) -> RemoteMatcher:
        """Return a matcher in the same state. The two are independent. Raise MatchersLostError."""
        copy = RemoteMatcher(self.child)
        self.child.call(Copy(copy.number, self.number))
        return copy

    def reset(self) -> None:
        """Reset to the start of the output, before the next step. The automata that were built are kept."""
        self.child.reset.append(self.number)


class MatcherClient:
    def __init__(
        self,
        tokenizer: bytes,
        eos_token_ids: list[int],
        vocab_size: int,
        max_rows: int,
        buffers: int,
        processes: int = _PROCESSES,
    ) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` as JSON.

        A step has at most `max_rows` rows, there are `buffers` buffers for the masks of steps, and at most `processes`
        processes.
        """
        self._layout = MaskLayout(buffers, max_rows, -(-vocab_size // 32))
        self._setup = (tokenizer, eos_token_ids, vocab_size)
        self._memory: MaskMemory | None = None
        self._slots = [_Slot() for _ in range(processes)]
        self._turns = itertools.count()
        self._opening = threading.Lock()
        self._is_closed = False

    def compile(self, grammar: str) -> RemoteMatcher:
        """Compile a translated grammar, by turns in each process.

        Raise BadRequestError if it is malformed or exceeds a limit, or if the tokenizer does not permit grammars, and
        MatchersLostError if the process does not start or ends.
        """
        matcher = RemoteMatcher(self._running(self._slots[next(self._turns) % len(self._slots)]))
        matcher.compile_seconds = matcher.child.call(Compile(matcher.number, grammar)).seconds
        return matcher

    def words(self, buffer: int) -> Words:
        """Return the masks of a buffer: int32 [max_rows, words]. A matcher must have been compiled."""
        assert self._memory is not None
        return self._memory.words(buffer)

    def begin(self, buffer: int) -> RemoteRun:
        """Return the masks of a step, which are written into a buffer that is not in use. It has no rows yet."""
        assert self._memory is not None
        return RemoteRun(buffer, self._memory.states(buffer))

    def consume(
        self, pairs: Sequence[tuple[RemoteMatcher, int]], run: RemoteRun | None, early: Sequence[bool]
    ) -> Callable[[], dict[int, BaseException | None]]:
        """Advance each matcher by its token.

        Return a function that waits, and returns which matchers do not go on, by their places in `pairs`: why they
        failed, or None if the output is complete. If a step fails, it need not be called.

        The masks of the matchers that are `early` become the next rows of `run`, in their order. They are computed at
        once, unless the matcher does not go on: then the row has no mask.
        """
        rows = [-1] * len(pairs)
        if run is not None:
            places = [place for place, is_early in enumerate(early) if is_early]
            for place, row in zip(places, run.add_matchers([pairs[place][0] for place in places]), strict=True):
                rows[place] = row
        asked = []
        for child, places in _by_child([matcher for matcher, _ in pairs]).items():
            numbers, tokens = [pairs[place][0].number for place in places], [pairs[place][1] for place in places]
            buffer = 0 if run is None else run.buffer
            asked.append((places, child.consume(numbers, tokens, buffer, [rows[place] for place in places])))

        def ends() -> dict[int, BaseException | None]:
            return {places[own]: why for places, answer in asked for own, why in answer().items()}

        return ends

    def start(self, matchers: Sequence[RemoteMatcher], run: RemoteRun) -> range:
        """Compute the masks of matchers. Return their rows, which are the next rows of `run`.

        The matchers and the rows belong to the processes until the rows are done.
        """
        rows = run.add_matchers(matchers)
        for child, places in _by_child(matchers).items():
            child.start(run.buffer, [rows[place] for place in places], [matchers[place].number for place in places])
        return rows

    def close(self) -> None:
        """End the processes. Idempotent. A process that is starting ends as soon as it has started."""
        self._is_closed = True
        for slot in self._slots:
            if slot.child is not None:
                slot.child.stop()

    def _running(self, slot: _Slot) -> MatcherChild:
        """Return the process of a slot. Start it if there is none, or if it ended."""
        with self._opening:
            if self._memory is None:
                self._memory = MaskMemory(self._layout)
        with slot.starting:
            if slot.child is not None:
                slot.child.check()
            if slot.child is None or slot.child.lost is not None:
                slot.child = MatcherChild(self._memory, *self._setup)
                if self._is_closed:
                    slot.child.stop()
            return slot.child


class RemoteRun(MaskProgress):
    """The masks of one step, which processes write."""

    def __init__(self, buffer: int, states: States) -> None:
        super().__init__(states)
        self.buffer = buffer
        self._matchers: list[RemoteMatcher] = []
        """Matcher of each row."""
        self._children: set[MatcherChild] = set()
        self._deadline = 0.0
        """Time until which the rows must be done."""

    def add_matchers(self, matchers: Sequence[RemoteMatcher]) -> range:
        """Add rows for the masks of matchers, and return them.

        All rows get the whole bound anew: a process that hangs may have held up the scheduler since the last call.
        """
        self._deadline = time.monotonic() + STEP_SECONDS
        self._matchers += matchers
        self._children.update([matcher.child for matcher in matchers])
        return self.add(len(matchers))

    def error(self, row: int) -> BaseException:
        matcher = self._matchers[row]
        return matcher.child.lost or matcher.child.explain(matcher.number)

    def check(self) -> None:
        is_overdue = time.monotonic() > self._deadline
        for child in self._children:
            child.check()
            if child.lost is None and not is_overdue:
                continue
            for row in np.flatnonzero(self._states == PENDING).tolist():
                if self._matchers[row].child is child:
                    child.lose(f"did not write all masks within {STEP_SECONDS:g} s and was killed")
                    self._states[row] = FAILED


@dataclass
class _Slot:
    """The place of one process, of which one after the other may end."""

    child: MatcherChild | None = None
    starting: threading.Lock = field(default_factory=threading.Lock)


def _by_child(matchers: Sequence[RemoteMatcher]) -> dict[MatcherChild, list[int]]:
    """Return the places of the matchers of each process."""
    places: dict[MatcherChild, list[int]] = {}
    for place, matcher in enumerate(matchers):
        places.setdefault(matcher.child, []).append(place)
    return places
