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

_DEEPEST = 4
"""Levels among which these are chosen; what is shared below is each entry's own."""

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


@dataclass
class _Node:
    """A stretch of pages that entries at neighbouring places have in common, and what some of them share below it."""

    first: int
    count: int
    end: int
    """First key after it; it begins where the one above ends."""
    below: list[_Node]


def find_runs(table: Ints, rows: Ints, lens: Ints, page_size: int, least: int) -> Runs:
    """Runs of at least `least` keys, of whole pages, which no entry's newest token is in.

    Entry i, of one or more, has the pages `table[rows[i]]`, of which those beyond its `lens[i]` keys (one at least) may
    be anything.
    """
    entry, whole = np.arange(len(rows)), (lens - 1) // page_size
    _, prefix, sharers = np.unique(
        np.where(whole > 0, table[rows, 0], -1 - entry), return_inverse=True, return_counts=True
    )
    together, alone = np.flatnonzero(sharers[prefix] > 1), np.flatnonzero(sharers[prefix] == 1)
    if not len(together):
        return _runs(entry, [])
    # Nobody shares what only the longest has; one column more, in which all differ.
    columns = int(np.partition(whole[together], -2)[-2]) + 1
    valid = np.arange(columns) < np.minimum(whole[together], columns - 1)[:, None]
    pages = np.where(valid, table[rows[together], :columns], -1 - together[:, None])
    # As bytes: which order it is does not matter, if only equal beginnings come together.
    order = np.argsort(pages.view(f"V{pages.itemsize * columns}").ravel(), kind="stable")
    pages = pages[order]
    # depth[i]: keys that the entries at places i and i + 1 share; sorted, those between two places share the least.
    depth = (pages[1:] != pages[:-1]).argmax(1) * page_size
    _, chosen = _most_saving(_tree(depth, least), 0, LEVELS)
    return _runs(np.concatenate([together[order], alone]), chosen)


def _tree(depth: Ints, least: int) -> list[_Node]:
    """The stretches of at least `least` keys that neighbours share, `depth[i]` those at places i and i + 1."""
    roots: list[_Node] = []
    above: list[_Node] = []
    covered = np.zeros_like(depth)
    """By the levels above."""
    for _ in range(_DEEPEST):
        joined = depth - covered >= least
        edge = np.diff(np.concatenate(([False], joined, [False])).astype(np.int8))
        firsts, lasts = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
        if not len(firsts):
            break
        ends = np.minimum.reduceat(np.append(depth, 0), np.stack([firsts, lasts], axis=1).ravel())[::2]
        nodes = [
            _Node(first, last - first + 1, end, [])
            for first, last, end in zip(firsts.tolist(), lasts.tolist(), ends.tolist(), strict=True)
        ]
        parents = np.searchsorted([node.first for node in above], firsts, side="right") - 1
        for node, parent in zip(nodes, parents.tolist(), strict=True):
            (above[parent].below if above else roots).append(node)
        covered[~joined] = np.iinfo(np.int64).max // 2  # between stretches nothing is shared below either
        covered[_spread(firsts, lasts - firsts)] = np.repeat(ends, lasts - firsts)
        above = nodes
    return roots


def _most_saving(nodes: list[_Node], begin: int, levels: int) -> tuple[int, list[tuple[int, ...]]]:
    """Which of `nodes` and those below become runs, at most `levels` after each other, so that most keys are saved.

    What is left out goes to the runs below it, which begin where the last chosen one above ends. Returns the keys
    saved and (first, count, begin, end, level) of each.
    """
    saved = 0
    chosen: list[tuple[int, ...]] = []
    for node in nodes if levels else []:
        inside = (node.count - 1) * (node.end - begin)
        below, runs = _most_saving(node.below, node.end, levels - 1)
        best, best_runs = inside + below, [(node.first, node.count, begin, node.end, LEVELS - levels), *runs]
        if node.below:
            below, runs = _most_saving(node.below, begin, levels)
            if below > best:
                best, best_runs = below, runs
        saved, chosen = saved + best, chosen + best_runs
    return saved, chosen


def _runs(order: Ints, chosen: list[tuple[int, ...]]) -> Runs:
    return Runs(order, *np.array(chosen, dtype=np.int64).reshape(-1, 5).T)


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
