"""The sizes of steps that are captured as CUDA graphs, and the rule to which sizes a smaller step may be padded.

`StepGraphs` reads them. Sizes are numbers of entries for steps that only decode, and of tokens for all others.
"""

from __future__ import annotations

import itertools

from verl_server.worker.step_memory import MOST_GRAPH_TOKENS


def decode_sizes(max_bs: int) -> list[int]:
    """Return the numbers of entries whose steps are captured.

    The numbers are sparse where padding is cheap: 17 rows take as long as 32 rows. Products compute tiles of 64 or 128
    rows. So above 64 entries, padding by less than a tile adds at most one tile. Above 128 entries, padding adds at
    most an eighth of the entries.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    return [size for size in [*sizes, *range(1152, max_bs, 128)] if size < max_bs] + [max_bs]


def mixed_sizes() -> list[int]:
    sizes = [*range(16, 129, 16), *range(192, 1025, 64), *range(1280, 8193, 256)]
    return [size for size in sizes if size <= MOST_GRAPH_TOKENS]


def may_pad(tokens: int, size: int) -> bool:
    """Return True if a step of `tokens` tokens may use a graph of `size`, so that the step captures no graph of its
    own.

    A quarter more tokens take at most a quarter more time, and less if attention takes most of the time. With few rows,
    a step takes the time that reading the weights takes.
    """
    return size - tokens <= max(tokens // 4, 16)


def covering(sizes: list[int]) -> set[int]:
    """Return the smallest subset of the ascending `sizes` to which steps with any number of tokens may be padded."""
    covering = [sizes[-1]]
    for below, size in reversed(list(itertools.pairwise([0, *sizes[:-1]]))):
        if not may_pad(below + 1, covering[-1]):
            covering.append(size)
    return set(covering)
