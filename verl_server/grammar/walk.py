"""`random_outputs`: follows a grammar with random tokens. A trial does this to find grammars that grow too much."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from verl_server.grammar.compiler import Matcher
from verl_server.grammar.failure import GrammarFailedError
from verl_server.grammar.mask_executor import MaskExecutor

_OUTPUTS, _TOKENS, _LEAST_MASKS = 8, 64, 4
"""Number of outputs, most tokens of each, and number of masks that are made even if they take long."""


def random_outputs(
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
