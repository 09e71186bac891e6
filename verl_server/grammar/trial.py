"""`try_out`: compiles a grammar and generates with it, in a process that may be killed.

A grammar can be small and its automata huge, at once or only after some tokens. If a trial succeeds, the scheduler can
compile the grammar, because the trial runs in a thread with a smaller stack and with a bound on memory.
"""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from verl_server.errors import BadRequestError
from verl_server.grammar.compiler import (
    COMPILER_STACK,
    GrammarCompiler,
    Matcher,
    stack_size,
)
from verl_server.grammar.failure import GrammarFailedError
from verl_server.grammar.json_schema import schemas_alone
from verl_server.grammar.mask_executor import MaskExecutor

MOST_MEMORY = 1 << 30
"""Bytes of address space that a trial may take. The process ends if it needs more."""
_OUTPUTS, _TOKENS, _LEAST_MASKS = 8, 64, 4
"""Number of outputs, most tokens of an output, and number of masks that are computed even if they take long."""
_SECONDS = 0.1
"""Seconds of processor time for random outputs."""
_MOST_TRIED_ALONE = 16
"""Schemas of a refused grammar that are tried one by one."""
_MOST_STEP_SECONDS = 0.02
"""Seconds of CPU time that the mask of one token may take. Other requests wait for this mask."""


def try_out(compiler: GrammarCompiler, grammar: str) -> int:
    """Compile a translated grammar and generate random outputs. Return the bytes that the compiled form takes, roughly.

    Raise BadRequestError if the grammar is malformed, allows no output, or exceeds a limit. The process may end, or not
    return: the caller must be able to kill it.
    """
    sizes: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            before = _statm(1) or 0
            try:
                _walk(compiler.compile(grammar), compiler.num_words)
            except BadRequestError as error:
                raise _with_owner(error, compiler, grammar) from None
            sizes.append(max(0, (_statm(1) or 0) - before))
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


def _with_owner(error: BadRequestError, compiler: GrammarCompiler, grammar: str) -> BadRequestError:
    """Return the error with the owner of the schema that has the error by itself, or with the owners of all schemas."""
    schemas = schemas_alone(grammar)
    if not schemas or any(str(error).startswith(f"{owner}: ") for owner in schemas):
        return error
    for owner, alone in islice(schemas.items(), _MOST_TRIED_ALONE):
        try:
            _walk(compiler.compile(alone), compiler.num_words)
        except BadRequestError as own:
            return BadRequestError(f"{owner}: {own}")
    return BadRequestError(f"{', '.join(islice(schemas, _MOST_TRIED_ALONE))}: {error}")


def _walk(matcher: Matcher, num_words: int) -> None:
    """Generate random outputs. Raise BadRequestError if that fails, or if the masks take too long."""
    tokens = slow = 0
    # Processor time, because other processes may use this machine. This process does nothing else.
    masks = _random_outputs(matcher, MaskExecutor(), num_words, time.process_time, _SECONDS)
    try:
        for count, (step, seconds) in enumerate(masks):
            tokens = step
            slow += seconds > _MOST_STEP_SECONDS and count > 0  # the first mask builds most automata
            if slow > 1:
                raise BadRequestError(_SLOW)
    except GrammarFailedError as error:
        raise BadRequestError(_FAILED.format(tokens=tokens, error=error)) from None


def _random_outputs(
    matcher: Matcher, executor: MaskExecutor, num_words: int, clock: Callable[[], float], seconds: float
) -> Iterator[tuple[int, float]]:
    """Generate random outputs with `matcher`, which is at its start again afterwards.

    It ends after `seconds` by `clock`, but not before `_LEAST_MASKS` masks, or when there are enough outputs. Yield
    (number of tokens before, seconds by `clock`) for each mask. Raise GrammarFailedError if the matcher fails, which
    cannot be used any more then.
    """
    rng, words = random.Random(0), np.zeros((1, num_words), dtype=np.int32)
    deadline, made = clock() + seconds, 0
    for _ in range(_OUTPUTS):
        for step in range(_TOKENS):
            start = clock()
            executor.fill([matcher], words)
            matcher.check()
            now, made = clock(), made + 1
            yield step, now - start
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8)[0], bitorder="little"))
            if not len(allowed):
                raise GrammarFailedError("it allows no token")
            executor.consume([(matcher, int(allowed[rng.randrange(len(allowed))]))])
            matcher.check()
            is_late = now > deadline and made >= _LEAST_MASKS
            if matcher.is_complete or is_late:
                break
        matcher.reset()
        if is_late:
            return


_FAILED = (
    "The grammar was refused, because a random output of it failed after {tokens} tokens: {error}. Use a simpler one."
)
_SLOW = (
    "The grammar was refused, because the masks of several tokens of a random output took more than "
    f"{1e3 * _MOST_STEP_SECONDS:g} ms each. Use a simpler one."
)


def _statm(column: int) -> int | None:
    """Return a column of /proc/self/statm in bytes, 0: address space, 1: resident. None: not Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    except OSError:
        return None


@contextmanager
def _memory_bound() -> Iterator[None]:
    """Limit the address space of this process, inside the block, to its present size plus `MOST_MEMORY` bytes.

    Set no limit if the system does not report the present size.
    """
    now = _statm(0)
    if now is None:
        yield
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = now + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
