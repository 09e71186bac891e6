"""`MatcherClient`: the matchers of a scheduler's requests, which are in a process of their own.

`Grammars` owns it. The first compilation starts the process. Threads that compile call `compile` and
`RemoteMatcher.copy`, and may wait there. The main thread calls `consume` and `start` for each step.

If the process ends, or does not answer, the requests that have a matcher in it end with an error, and the next
compilation starts another process. Other requests do not notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from verl_server.grammar.mask_memory import FAILED, PENDING, MaskLayout, MaskMemory, Words
from verl_server.grammar.mask_progress import MaskProgress
from verl_server.grammar.matcher_child import STEP_SECONDS, MatcherChild
from verl_server.grammar.matcher_messages import Compile, Copy


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
        self, tokenizer: bytes, eos_token_ids: list[int], vocab_size: int, max_rows: int, buffers: int
    ) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` as JSON.

        A step has at most `max_rows` rows, and there are `buffers` buffers for the masks of steps.
        """
        self._layout = MaskLayout(buffers, max_rows, -(-vocab_size // 32))
        self._setup = (tokenizer, eos_token_ids, vocab_size)
        self._memory: MaskMemory | None = None
        self._child: MatcherChild | None = None
        self._starting = threading.Lock()

    def compile(self, grammar: str) -> RemoteMatcher:
        """Compile a translated grammar.

        Raise BadRequestError if it is malformed or exceeds a limit, or if the tokenizer does not permit grammars, and
        MatchersLostError if the process does not start or ends.
        """
        matcher = RemoteMatcher(self._running())
        matcher.compile_seconds = matcher.child.call(Compile(matcher.number, grammar)).seconds
        return matcher

    def words(self, buffer: int) -> Words:
        """Return the masks of a buffer: int32 [max_rows, words]. A matcher must have been compiled."""
        assert self._memory is not None
        return self._memory.words(buffer, self._layout.rows)

    def consume(self, pairs: Sequence[tuple[RemoteMatcher, int]]) -> list[bool | BaseException]:
        """Advance each matcher by its token. Return for each whether its output is complete, or why it failed.

        No matcher may be lost.
        """
        child = pairs[0][0].child
        return child.consume([matcher.number for matcher, _ in pairs], [token for _, token in pairs])

    def start(self, matchers: Sequence[RemoteMatcher], buffer: int) -> MaskProgress:
        """Compute the masks of matchers, of which none is lost, into the first rows of a buffer that is not in use.

        The matchers and the buffer belong to the process until the rows are done.
        """
        assert self._memory is not None
        states = self._memory.states(buffer, len(matchers))
        states[:] = PENDING
        child, numbers = matchers[0].child, [matcher.number for matcher in matchers]
        child.start(buffer, numbers)
        deadline = time.monotonic() + STEP_SECONDS

        def error(row: int) -> BaseException:
            return child.lost or child.explain(numbers[row])

        def check() -> None:
            child.check()
            if time.monotonic() > deadline and not states.all():
                child.lose(f"did not write all masks within {STEP_SECONDS:g} s and was killed")
            if child.lost is not None:
                states[states == PENDING] = FAILED

        return MaskProgress(states, error, check)

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._starting:
            if self._child is not None:
                self._child.lose("was stopped")
            if self._memory is not None:
                self._memory.close()

    def _running(self) -> MatcherChild:
        """Return the process. Start it if there is none, or if it ended."""
        with self._starting:
            if self._memory is None:
                self._memory = MaskMemory(self._layout)
            if self._child is not None:
                self._child.check()
            if self._child is None or self._child.lost is not None:
                self._child = None
                self._child = MatcherChild(self._memory, *self._setup)
            return self._child
