"""Which keys several entries of a decode step share, and who reads them: the host's part of cascade attention.

Samples of one prompt have its pages in common, agents their system prompt. Attention over such keys is computed for
all these entries together, so that the keys are read once and not once for each (Hydragen: Juravsky et al., 2024;
FlashInfer's cascade). `find_runs` reads the page table, `deal_out` turns what it found into `shared_kernel`'s work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

LEVELS = 2
"""Runs that may follow each other in one entry: a system prompt, and a task's that a group of samples has in common."""

ITEM = 8
"""Integers of an item: first place, entries, first key, end, level; its tile's chunks and first slot, its chunk."""


@dataclass(frozen=True)
class Runs:
    """Runs of keys that entries share. Those of run r stand next to each other in `order`."""

    order: Ints
    """[entries] the entries, sorted by their pages."""
    first: Ints
    """[runs] place in `order` of the first entry that shares it."""
    count: Ints
    """[runs] entries that do, two or more."""
    begin: Ints
    """[runs] first key: 0, or where the run of the level above ends."""
    end: Ints
    level: Ints

    @property
    def saved(self) -> int:
        """Keys that need not be read again."""
        return int(((self.count - 1) * (self.end - self.begin)).sum())

    def per_entry(self) -> tuple[Ints, Ints]:
        """([entries] keys that are shared, [entries] in how many runs); what follows is the entry's own."""
        starts, levels = np.zeros_like(self.order), np.zeros_like(self.order)
        if not len(self.first):
            return starts, levels
        members = self.order[_spread(self.first, self.count)]
        np.maximum.at(starts, members, np.repeat(self.end, self.count))
        np.maximum.at(levels, members, np.repeat(self.level + 1, self.count))
        return starts, levels


def find_runs(pages: Ints, lens: Ints, page_size: int, least: int) -> Runs:
    """Runs of at least `least` keys, of whole pages, which no entry's newest token is in.

    `pages` [entries, columns], neither 0, is each entry's row of the page table, with columns enough for all entries
    but the longest; what lies beyond its `lens` may be anything.
    """
    none, entry = np.zeros(0, dtype=np.int64), np.arange(len(pages))
    whole = (lens - 1) // page_size
    pages = np.where(np.arange(pages.shape[1]) < whole[:, None], pages, -1 - entry[:, None])
    if len(np.unique(pages[:, 0])) == len(pages):
        return Runs(entry, *[none] * 5)
    # As bytes: which order it is does not matter, if only equal beginnings come together.
    order = np.argsort(pages.view(f"V{pages.itemsize * pages.shape[1]}").ravel(), kind="stable")
    ordered = pages[order]
    # depth[i]: keys that the entries at places i and i + 1 share; sorted, those between two places share the least.
    depth = (ordered[1:] != ordered[:-1]).argmax(1) * page_size
    covered = np.zeros_like(depth)
    """By runs of the levels above."""
    found = []
    for level in range(LEVELS):
        joined = depth - covered >= least
        edge = np.diff(np.concatenate(([False], joined, [False])).astype(np.int8))
        first, last = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
        if not len(first):
            break
        end = np.array([depth[a:b].min() for a, b in zip(first, last, strict=True)])
        found.append((first, last - first + 1, covered[first], end, np.full_like(first, level)))
        covered[~joined] = np.iinfo(np.int64).max // 2  # between runs nothing is shared below either
        covered[_spread(first, last - first)] = np.repeat(end, last - first)
    if not found:
        return Runs(order, *[none] * 5)
    return Runs(order, *(np.concatenate(part) for part in zip(*found, strict=True)))


def deal_out(runs: Runs, *, tile: int, grain: int, heads: int, programs: int, slots: int) -> Ints:
    """Items [items, ITEM], the longest first: chunks of tiles, of at most `tile` entries of a run and full `grain`s of
    keys but for the last.

    Every head of an item is a job; program p takes jobs p, p + programs and so on. A tile of several chunks leaves a
    part for each of them in a slot, of which there are `slots` for each head.
    """
    if not len(runs.first):
        return np.zeros((0, ITEM), dtype=np.int64)
    tiles = -(-runs.count // tile)
    run = np.repeat(np.arange(len(tiles)), tiles)
    index = np.arange(len(run)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    low, high = runs.count[run] * index // tiles[run], runs.count[run] * (index + 1) // tiles[run]
    blocks = -(-(runs.end - runs.begin)[run] // grain)
    chunks = np.ones_like(blocks)
    best = _rounds(blocks, chunks, heads, programs)
    even = max(1, -(-int(blocks.sum()) * heads // programs))
    for longest in (-(-even // 2), even, 2 * even, 4 * even):
        cut = -(-blocks // longest)
        cost = _rounds(blocks, cut, heads, programs)
        if cost < best and int(cut[cut > 1].sum()) <= slots:
            chunks, best = cut, cost
    size = -(-blocks // chunks)
    chunks = -(-blocks // size)
    slot = np.cumsum(np.where(chunks > 1, chunks, 0)) - np.where(chunks > 1, chunks, 0)
    of = np.repeat(np.arange(len(chunks)), chunks)
    chunk = np.arange(len(of)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    begin = runs.begin[run][of] + chunk * size[of] * grain
    end = np.minimum(begin + size[of] * grain, runs.end[run][of])
    first, count = (runs.first[run] + low)[of], (high - low)[of]
    items = np.stack([first, count, begin, end, runs.level[run][of], chunks[of], slot[of], chunk], axis=1)
    return items[np.argsort(begin - end, kind="stable")]


def _rounds(blocks: Ints, chunks: Ints, heads: int, programs: int) -> float:
    """About how long it takes, in blocks that a program reads: the busiest one's jobs, each one more for its beginning
    and end, and putting the parts of a tile together, half a block each."""
    sizes = np.sort(np.repeat(-(-blocks // chunks), chunks))[::-1]
    merge = 0.5 * int(chunks.max()) if chunks.max() > 1 else 0.0
    return float((np.repeat(sizes, heads)[::programs] + 1).sum()) + merge


def _spread(first: Ints, count: Ints) -> Ints:
    """first[0], first[0] + 1, .. (count[0] of them), first[1], .."""
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
