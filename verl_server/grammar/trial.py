"""`try_out`: compiles a grammar and generates with it, in a process that may be killed.

A grammar can be small and its automata huge, at once or only after some tokens. Whatever a trial survives, the
scheduler can compile: the trial runs in a thread with a smaller stack and with a bound on memory.
"""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from verl_server.errors import BadRequestError
from verl_server.grammar.compiler import (
    COMPILER_STACK,
    GrammarCompiler,
    MaskExecutor,
    Matcher,
    stack_size,
)
from verl_server.grammar.failure import GrammarFailedError

MOST_MEMORY = 1 << 30
"""Bytes of address space that a trial may take. The process ends if it needs more."""
_WALKS, _WALK_TOKENS, _WALK_SECONDS = 4, 64, 0.25
"""Number of random outputs, most tokens of each, and most CPU seconds for all."""
_MOST_STEP_SECONDS = 0.02
"""CPU time that the mask of one token may take. Other requests wait for it."""


def try_out(compiler: GrammarCompiler, grammar: str) -> int:
    """Compile a translated grammar and generate random outputs. Return the bytes that the compiled form takes, roughly.

    Raise BadRequestError if the grammar is malformed, allows no output, or exceeds a limit. The process may end, or not
    return: the caller must be able to kill it.
    """
    sizes: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            before = _resident_bytes()
            matcher = compiler.compile(grammar)
            _walk(matcher, compiler.num_words)
            sizes.append(max(0, _resident_bytes() - before))
        except BaseException as error:  # a panic of llguidance is no Exception
            failures.append(error)

    with _memory_bound(), stack_size(COMPILER_STACK // 4):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    if failures:
        raise _refusal(failures[0])
    return sizes[0]


def _refusal(error: BaseException) -> Exception:
    if isinstance(error, BadRequestError):
        return error
    if isinstance(error, MemoryError):
        return BadRequestError(f"The grammar takes more than {MOST_MEMORY >> 20} MiB of memory. Use a smaller one.")
    return BadRequestError(f"The grammar made the compiler fail ({type(error).__name__}). Use a simpler one.")


def _walk(matcher: Matcher, num_words: int) -> None:
    """Generate random outputs until a bound is reached. Raise BadRequestError if that fails or a step is too slow."""
    rng = random.Random(0)
    executor, words = MaskExecutor(1), np.zeros((1, num_words), dtype=np.int32)
    deadline, slow = time.process_time() + _WALK_SECONDS, 0
    for walk in range(_WALKS):
        state = matcher.copy()
        for step in range(_WALK_TOKENS):
            start = time.process_time()
            executor.fill([state], words)
            slow += time.process_time() - start > _MOST_STEP_SECONDS and walk + step > 0
            try:
                state.check()
            except GrammarFailedError as error:
                raise BadRequestError(_FAILED.format(tokens=step, error=error)) from None
            if slow > 1:
                raise BadRequestError(_SLOW)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8)[0], bitorder="little"))
            if not len(allowed):
                raise BadRequestError(
                    "The grammar allows no token. " + _FAILED.format(tokens=step, error="none is left")
                )
            try:
                executor.consume([(state, int(allowed[rng.randrange(len(allowed))]))])
                state.check()
            except GrammarFailedError as error:
                raise BadRequestError(_FAILED.format(tokens=step, error=error)) from None
            if state.is_complete:
                break
            if time.process_time() > deadline:
                return


_FAILED = (
    "The grammar was refused, because a random output of it failed after {tokens} tokens: {error}. Use a simpler one."
)
_SLOW = (
    "The grammar was refused, because the masks of several tokens of a random output took more than "
    f"{1e3 * _MOST_STEP_SECONDS:g} ms each. Use a simpler one."
)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0


@contextmanager
def _memory_bound() -> Iterator[None]:
    """Bound the address space of this process, where the system can, to what it has now and `MOST_MEMORY`."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = now + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
