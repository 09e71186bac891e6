"""`MatcherChild`: one process of matchers, from its start to its end, as its scheduler sees it.

`MatcherClient` makes some, and another one for each that has ended. Each wait has a bound. A process that does not
answer in time is killed, so that a process is either alive and answers, or lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from verl_server.errors import BadRequestError, ServerLaunchError
from verl_server.grammar.failure import MatchersLostError
from verl_server.grammar.mask_memory import MaskMemory
from verl_server.grammar.matcher_messages import (
    BROKEN,
    GOES_ON,
    Answer,
    Call,
    Consume,
    Explain,
    Setup,
    Start,
    error_of,
)
from verl_server.ipc.blocking_messages import BlockingMessages
from verl_server.ipc.child_process import ChildProcess, describe_exit

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
"""Seconds for the start of the process and for reading the tokenizer."""
_CALL_SECONDS = 60.0
"""Seconds for a compilation. Text workers have tried out every grammar before."""
STEP_SECONDS = 20.0
"""Seconds after which a process that does not advance matchers, or does not write masks, is killed.

The limits of llguidance let a mask take some milliseconds.
"""
_EXIT_SECONDS = 2.0
"""Seconds that a process has to end after it has closed its sockets."""
_CONNECTIONS = 2
"""Number of grammars that a process compiles at the same time."""


class MatcherChild:
    def __init__(self, memory: MaskMemory, tokenizer: bytes, eos_token_ids: list[int], vocab_size: int) -> None:
        """Start the process. Raise MatchersLostError if it does not start, BadRequestError for its tokenizer."""
        self.numbers = itertools.count()
        """Numbers for matchers."""
        self.reset: deque[int] = deque()
        """Matchers to reset before the next step."""
        self.dropped: deque[int] = deque()
        """Matchers that nobody uses any more. Threads append to it."""
        self.lost: MatchersLostError | None = None
        """Why the process cannot be used any more."""
        self._ending = threading.Lock()
        self._has_answer = False
        """True if an answer to `consume` was not read yet."""
        pairs = [socket.socketpair() for _ in range(1 + _CONNECTIONS)]
        self._steps, *calls = [BlockingMessages(ours) for ours, _ in pairs]
        self._calls: SimpleQueue[BlockingMessages] = SimpleQueue()
        theirs = [end.fileno() for _, end in pairs]
        argument = {"steps": theirs[0], "calls": theirs[1:], "memory": memory.fd}
        self._child = ChildProcess(
            "matchers", "verl_server.grammar.matcher_process", argument, pass_fds=(*theirs, memory.fd)
        )
        for _, end in pairs:
            end.close()
        layout = memory.layout
        setup = Setup(tokenizer, eos_token_ids, vocab_size, layout.buffers, layout.rows, layout.num_words)
        try:
            self._child.wait_ready(_START_SECONDS)
            self._ask(self._steps, msgspec.msgpack.encode(setup), _START_SECONDS)
        except ServerLaunchError as error:
            first, *_ = str(error).splitlines()  # the end of its log follows, which `lose` logs
            self._raise_lost(f"did not start: {first.rstrip('.')}")
        except BadRequestError:  # the process has ended by itself
            self.stop()
            raise
        for messages in calls:
            self._calls.put(messages)

    # -- called by threads that compile ------------------------------------------------------------------------------

    def call(self, message: Call) -> Answer:
        """Return the answer of a call. Raise its error, or MatchersLostError."""
        messages = self._calls.get()
        try:
            return self._ask(messages, msgspec.msgpack.encode(message), _CALL_SECONDS)
        finally:
            self._calls.put(messages)

    # -- called by the main thread -----------------------------------------------------------------------------------

    def consume(
        self, matchers: list[int], tokens: list[int], buffer: int, rows: list[int]
    ) -> Callable[[], dict[int, BaseException | None]]:
        """Advance matchers by tokens, then compute masks into rows of a buffer, for those whose row is not -1.

        Return a function that waits, and returns which matchers do not go on, by their places: why they failed, or None
        if the output is complete. If the function is not called, because the step failed, its answer is dropped.
        """
        self._drop_answer()
        message = Consume(matchers, tokens, buffer, rows, _take(self.reset), _take(self.dropped))
        deadline = time.monotonic() + STEP_SECONDS  # from here, because the other processes work at the same time
        with contextlib.suppress(MatchersLostError):
            self._send(self._steps, msgspec.msgpack.encode(message), STEP_SECONDS)
            self._has_answer = True

        def ends() -> dict[int, BaseException | None]:
            self._has_answer = False
            try:
                states = self._receive(self._steps, STEP_SECONDS, deadline)
            except MatchersLostError as error:
                return dict.fromkeys(range(len(matchers)), error)
            places = [place for place, state in enumerate(states) if state != GOES_ON] if any(states) else []
            return {place: self.explain(matchers[place]) if states[place] == BROKEN else None for place in places}

        return ends

    def start(self, buffer: int, rows: list[int], matchers: list[int]) -> None:
        """Compute masks into rows of a buffer. If the process has ended, nobody computes them."""
        message = Start(buffer, rows, matchers, _take(self.reset), _take(self.dropped))
        with contextlib.suppress(MatchersLostError):
            self._send(self._steps, msgspec.msgpack.encode(message), STEP_SECONDS)

    def explain(self, matcher: int) -> BaseException:
        """Return why a matcher failed."""
        self._drop_answer()
        try:
            self._ask(self._steps, msgspec.msgpack.encode(Explain(matcher)), STEP_SECONDS)
        except Exception as error:
            return error
        raise AssertionError("a matcher that failed has an error")

    def _drop_answer(self) -> None:
        """Read the answer to `consume` that nobody read."""
        if self._has_answer:
            self._has_answer = False
            with contextlib.suppress(MatchersLostError):
                self._receive(self._steps, STEP_SECONDS)

    def check(self) -> None:
        """Set `lost` if the process has ended."""
        if self.lost is None and self._child.poll() is not None:
            self.lose()

    def lose(self, why: str = "") -> None:
        """Kill the process, set `lost` and log why. Safe in any thread, and idempotent."""
        if self._end(why):
            logger.error("%s%s", self.lost, self._child.log_tail())

    def stop(self) -> None:
        """End the process together with its server. Safe in any thread, and idempotent."""
        self._end("was stopped")

    def _end(self, why: str) -> bool:
        with self._ending:
            if self.lost is not None:
                return False
            if not why:  # it closed its sockets, so it is about to end: a signal would hide the reason
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.popen.wait(timeout=_EXIT_SECONDS)
            code = self._child.terminate(grace=0.0)
            why = why or f"ended with {describe_exit(code)}"
            self.lost = MatchersLostError(
                f"The process that computes the masks of grammars {why}. Send the request again: the next one with a "
                "grammar starts another process."
            )
            return True

    def _ask(self, messages: BlockingMessages, message: bytes, seconds: float) -> Answer:
        self._send(messages, message, seconds)
        answer = msgspec.msgpack.decode(self._receive(messages, seconds), type=Answer)
        if (error := error_of(answer)) is not None:
            raise error
        return answer

    def _receive(self, messages: BlockingMessages, seconds: float, deadline: float | None = None) -> bytes:
        """Return an answer, which must arrive within `seconds`. They end at `deadline`, by default from now on."""
        if self.lost is not None:
            raise self.lost
        try:
            answer = messages.receive(seconds if deadline is None else deadline - time.monotonic())
        except TimeoutError:
            self._raise_lost(f"did not answer within {seconds:g} s and was killed")
        if answer is None:
            self._raise_lost()
        return answer

    def _send(self, messages: BlockingMessages, message: bytes, seconds: float) -> None:
        if self.lost is not None:
            raise self.lost
        try:
            messages.send(message, seconds)
        except TimeoutError:
            self._raise_lost(f"read no message within {seconds:g} s and was killed")

    def _raise_lost(self, why: str = "") -> NoReturn:
        self.lose(why)
        assert self.lost is not None
        raise self.lost


def _take(numbers: deque[int]) -> list[int]:
    """Remove and return what is in `numbers` now. Other threads may append meanwhile."""
    return [numbers.popleft() for _ in range(len(numbers))]
