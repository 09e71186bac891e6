"""A process of matchers: the entry of `ChildProcess("matchers", "verl_server.grammar.matcher_process")`.

A scheduler's `MatcherClient` starts some of them with the first grammars. Each compiles grammars, has the matchers of a
part of the requests, advances them by the sampled tokens, and writes masks into the `MaskMemory`. Threads that compute
masks take turns at the interpreter's lock, so in the scheduler's process they would hold up the launches of steps.

The main thread serves steps. Each connection for calls has a thread. Like all children, the process ends with its
parent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.grammar.compiler import COMPILER_STACK, GrammarCompiler, Matcher, stack_size
from verl_server.grammar.mask_executor import MaskExecutor, MaskRun
from verl_server.grammar.mask_memory import FAILED, WRITTEN, MaskLayout, MaskMemory
from verl_server.grammar.matcher_messages import (
    BROKEN,
    COMPLETE,
    GOES_ON,
    Answer,
    Call,
    Compile,
    Consume,
    Explain,
    Setup,
    Start,
    StepMessage,
    answer_of,
)
from verl_server.ipc.blocking_messages import BlockingMessages
from verl_server.ipc.child_process import child_main


class MatcherServer:
    """Matchers of a scheduler's requests, by the numbers that the scheduler gave them."""

    def __init__(self, compiler: GrammarCompiler, memory: MaskMemory) -> None:
        self.compiler = compiler
        self._memory, self._executor = memory, MaskExecutor()
        self._matchers: dict[int, Matcher] = {}
        self._errors: dict[int, BaseException] = {}
        """Why matchers failed."""

    def call(self, message: Call) -> Answer:
        """Make a matcher. Called by several threads."""
        start = time.thread_time()
        try:
            if isinstance(message, Compile):
                self._matchers[message.matcher] = self.compiler.compile(message.grammar)
            else:
                self._matchers[message.matcher] = self._matchers[message.of].copy()
        except BaseException as error:  # a panic of llguidance is no Exception
            return answer_of(error)
        return Answer(time.thread_time() - start)

    def consume(self, message: Consume) -> tuple[bytes, Start]:
        """Advance matchers. Return their states, and the masks to compute now."""
        self._forget(message.reset, message.dropped)
        matchers = [self._matchers[number] for number in message.matchers]
        outcomes = self._executor.consume(list(zip(matchers, message.tokens, strict=True)))
        states, memory = bytearray(), self._memory.states(message.buffer)
        masks = Start(message.buffer, [], [], [], [])
        for number, row, outcome in zip(message.matchers, message.rows, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._errors[number] = outcome
            elif not outcome and row >= 0:
                masks.rows.append(row)
                masks.matchers.append(number)
            states.append(BROKEN if isinstance(outcome, BaseException) else COMPLETE if outcome else GOES_ON)
            if row >= 0 and states[-1] != GOES_ON:
                memory[row] = FAILED if states[-1] == BROKEN else WRITTEN  # its request ends: nobody reads the mask
        return bytes(states), masks

    def start(self, message: Start) -> None:
        """Start to compute masks."""
        self._forget(message.reset, message.dropped)
        matchers = [self._matchers[number] for number in message.matchers]
        numbers = dict(zip(message.rows, message.matchers, strict=True))

        def note(row: int, error: BaseException) -> None:
            self._errors[numbers[row]] = error

        words, states = self._memory.words(message.buffer), self._memory.states(message.buffer)
        self._executor.start(MaskRun(matchers, message.rows, words, states, note))

    def explain(self, message: Explain) -> Answer:
        return answer_of(self._errors[message.matcher])

    def _forget(self, reset: list[int], dropped: list[int]) -> None:
        for number in reset:
            if (matcher := self._matchers.get(number)) is not None:
                matcher.reset()
        for number in dropped:
            self._matchers.pop(number, None)  # a grammar that was refused has no matcher
            self._errors.pop(number, None)


def _serve_calls(server: MatcherServer, messages: BlockingMessages) -> None:
    decoder = msgspec.msgpack.Decoder(Call)
    while (data := messages.receive()) is not None:
        messages.send(msgspec.msgpack.encode(server.call(decoder.decode(data))))


def _serve_steps(server: MatcherServer, messages: BlockingMessages) -> None:
    decoder = msgspec.msgpack.Decoder(StepMessage)
    while (data := messages.receive()) is not None:
        match decoder.decode(data):
            case Consume() as message:
                states, masks = server.consume(message)
                messages.send(states)
                server.start(masks)
            case Start() as message:
                server.start(message)
            case Explain() as message:
                messages.send(msgspec.msgpack.encode(server.explain(message)))


def _set_up(setup: Setup, memory: int) -> MatcherServer:
    layout = MaskLayout(setup.buffers, setup.rows, setup.num_words)
    compiler = GrammarCompiler(setup.tokenizer, setup.eos_token_ids, setup.vocab_size)
    return MatcherServer(compiler, MaskMemory(layout, memory))


def run_matchers(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve the scheduler until it closes the connection of steps. `child_main` calls this function.

    `argument` has the descriptors: "steps", "calls" (a list) and "memory".
    """
    steps = BlockingMessages(socket.socket(fileno=argument["steps"]))
    calls = [BlockingMessages(socket.socket(fileno=fd)) for fd in argument["calls"]]
    ready({})
    data = steps.receive()
    if data is None:
        return
    try:
        server = _set_up(msgspec.msgpack.decode(data, type=Setup), argument["memory"])
    except BadRequestError as error:
        steps.send(msgspec.msgpack.encode(answer_of(error)))
        return
    steps.send(msgspec.msgpack.encode(Answer()))
    with stack_size(COMPILER_STACK):
        for messages in calls:
            threading.Thread(target=_serve_calls, args=(server, messages), name="grammar-compiler", daemon=True).start()
    _serve_steps(server, steps)


if __name__ == "__main__":
    child_main(run_matchers)
