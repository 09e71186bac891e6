"""`random_outputs`: follows a grammar with random tokens, which builds the automata that outputs need.

A trial does this to find grammars that grow too much. The scheduler does it to start requests with automata that exist:
otherwise each request would build its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np

from verl_server.grammar.compiler import MaskExecutor, Matcher
from verl_server.grammar.failure import GrammarFailedError

_OUTPUTS, _TOKENS, _SECONDS = 8, 64, 0.25
"""Number of outputs, most tokens of each, and most CPU seconds of this process for all of them."""


def random_outputs(matcher: Matcher, executor: MaskExecutor, num_words: int) -> Iterator[tuple[int, float]]:
    """Generate random outputs with `matcher`, which is at its start again afterwards.

    Yield (number of tokens before, CPU seconds of this process) for each mask. Raise GrammarFailedError if the matcher
    fails, which cannot be used any more then.
    """
    rng, words = random.Random(0), np.zeros((1, num_words), dtype=np.int32)
    deadline = time.process_time() + _SECONDS
    for _ in range(_OUTPUTS):
        for step in range(_TOKENS):
            start = time.process_time()
            executor.fill([matcher], words)
            matcher.check()
            now = time.process_time()
            yield step, now - start
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8)[0], bitorder="little"))
            if not len(allowed):
                raise GrammarFailedError("it allows no token")
            executor.consume([(matcher, int(allowed[rng.randrange(len(allowed))]))])
            matcher.check()
            if matcher.is_complete or now > deadline:
                break
        matcher.reset()
        if time.process_time() > deadline:
            return
