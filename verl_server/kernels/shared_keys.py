"""The host's part of cascade attention: finding keys that several decodes share, and planning the work on them.

Samples of one prompt share its pages, and agents share the pages of their system prompt. Attention over such keys is
computed for all these entries together, so the keys are read once instead of once for each entry (Hydragen: Juravsky et
al., 2024; FlashInfer's cascade). `find_runs` searches the page table for runs of shared keys, and `plan_items` divides
these runs into work items for `shared_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

LEVELS = 2
"""Largest number of runs in one entry: for example a system prompt, then a task prompt that samples share."""

_MAX_DEPTH = 4
"""Levels of the tree of shared prefixes that are searched for these runs. If keys are shared only at deeper levels,
each entry reads them by itself."""

ITEM = 8
"""Number of integers of an item: index in `Runs.order` of its first entry, number of entries, first key, end of the
keys, level, number of chunks of its tile, first slot of its tile, index of its chunk."""


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive keys that several entries share."""

    order: Ints
    """[entries] indices of the entries, sorted by their pages, so that those that share a run are adjacent."""
    first: Ints
    """[runs] index in `order` of the first entry that shares the run."""
    count: Ints
    """[runs] number of entries that share the run, at least 2."""
    begin: Ints
    """[runs] first key: 0, or the end of the run of the level above."""
    end: Ints
    """[runs] one more than the last key."""
    level: Ints
    """[runs] number of runs that come before this one in its entries."""

    @property
    def saved(self) -> int:
        """Number of keys that are not read again."""
        return int(((self.count - 1) * (self.end - self.begin)).sum())

    def per_entry(self) -> tuple[Ints, Ints]:
        """([entries] number of shared keys, [entries] number of runs). The keys behind them are the entry's own."""
        starts, levels = np.zeros_like(self.order), np.zeros_like(self.order)
        if not len(self.first):
            return starts, levels
        members = self.order[_ranges(self.first, self.count)]
        np.maximum.at(starts, members, np.repeat(self.end, self.count))
        np.maximum.at(levels, members, np.repeat(self.level + 1, self.count))
        return starts, levels


@dataclass
class _Node:
    """A run of pages that adjacent entries share, in the tree of shared prefixes."""

    first: int
    """Index in the sorted order of the first entry that shares the run."""
    count: int
    """Number of entries that share the run."""
    end: int
    """First key behind the run. The run begins at the end of its parent."""
    below: list[_Node]
    """Children: runs behind this one that some of the entries share."""


def find_runs(table: Ints, rows: Ints, lens: Ints, page_size: int, min_keys: int) -> Runs:
    """Find runs of at least `min_keys` shared keys. Runs consist of whole pages without any entry's newest token.

    There is at least one entry. Entry i has `lens[i]` >= 1 keys in the pages `table[rows[i]]`; the page ids behind
    these keys may be arbitrary.
    """
    entry, whole = np.arange(len(rows)), (lens - 1) // page_size
    _, prefix, sharers = np.unique(
        np.where(whole > 0, table[rows, 0], -1 - entry), return_inverse=True, return_counts=True
    )
    together, alone = np.flatnonzero(sharers[prefix] > 1), np.flatnonzero(sharers[prefix] == 1)
    if not len(together):
        return _runs(entry, [])
    # No entry shares the pages that only the longest entry has. In one further column all entries differ.
    columns = int(np.partition(whole[together], -2)[-2]) + 1
    valid = np.arange(columns) < np.minimum(whole[together], columns - 1)[:, None]
    pages = np.where(valid, table[rows[together], :columns], -1 - together[:, None])
    # The rows of pages are sorted as bytes. Any other order that makes rows with equal first pages adjacent would do.
    order = np.argsort(pages.view(f"V{pages.itemsize * columns}").ravel(), kind="stable")
    pages = pages[order]
    # depth[i] is the number of keys that entries i and i + 1 of the order share. Since the order is sorted, the entries
    # from i to j all share the minimum of depth[i:j].
    depth = (pages[1:] != pages[:-1]).argmax(1) * page_size
    _, chosen = _choose_runs(_tree(depth, min_keys), 0, LEVELS)
    return _runs(np.concatenate([together[order], alone]), chosen)


def _tree(depth: Ints, min_keys: int) -> list[_Node]:
    """Return the roots of the tree of shared prefixes, whose nodes have at least `min_keys` keys each.

    Entries i and i + 1 of the sorted order share `depth[i]` keys.
    """
    roots: list[_Node] = []
    above: list[_Node] = []
    covered = np.zeros_like(depth)  # keys in nodes of the levels above
    for _ in range(_MAX_DEPTH):
        joined = depth - covered >= min_keys
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
        covered[~joined] = np.iinfo(np.int64).max // 2  # entries of different nodes share nothing below, either
        covered[_ranges(firsts, lasts - firsts)] = np.repeat(ends, lasts - firsts)
        above = nodes
    return roots


def _choose_runs(nodes: list[_Node], begin: int, levels: int) -> tuple[int, list[tuple[int, ...]]]:
    """Choose the nodes that become runs, at most `levels` on a path, so that the number of saved keys is the largest.

    The keys of a node that is not chosen belong to the runs below it, which begin at `begin`: the end of the last run
    that was chosen above. Return (number of saved keys, [(first, count, begin, end, level) of each run]).
    """
    saved = 0
    chosen: list[tuple[int, ...]] = []
    for node in nodes if levels else []:
        inside = (node.count - 1) * (node.end - begin)
        below, runs = _choose_runs(node.below, node.end, levels - 1)
        best, best_runs = inside + below, [(node.first, node.count, begin, node.end, LEVELS - levels), *runs]
        if node.below:
            below, runs = _choose_runs(node.below, begin, levels)
            if below > best:
                best, best_runs = below, runs
        saved, chosen = saved + best, chosen + best_runs
    return saved, chosen


def _runs(order: Ints, chosen: list[tuple[int, ...]]) -> Runs:
    return Runs(order, *np.array(chosen, dtype=np.int64).reshape(-1, 5).T)


def plan_items(runs: Runs, *, tile: int, grain: int, heads: int, programs: int, slots: int) -> Ints:
    """Divide runs into work items [items, ITEM], the one with most keys first.

    The entries of a run are divided into tiles of at most `tile` entries, and the keys of a tile into chunks, whose
    length is a multiple of `grain` except for the last chunk. An item is one chunk of one tile. Each of the `heads` KV
    heads of an item is a job; program p of `programs` does jobs p, p + programs and so on. If a tile has several
    chunks, each one stores its part of the result in a slot; there are `slots` slots for each head.
    """
    if not len(runs.first):
        return np.zeros((0, ITEM), dtype=np.int64)
    tiles = -(-runs.count // tile)
    run = np.repeat(np.arange(len(tiles)), tiles)
    index = np.arange(len(run)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    low, high = runs.count[run] * index // tiles[run], runs.count[run] * (index + 1) // tiles[run]
    blocks = -(-(runs.end - runs.begin)[run] // grain)
    chunks = np.ones_like(blocks)
    best = _estimated_time(blocks, chunks, heads, programs)
    even = max(1, -(-int(blocks.sum()) * heads // programs))
    for longest in (-(-even // 2), even, 2 * even, 4 * even):
        cut = -(-blocks // longest)
        cost = _estimated_time(blocks, cut, heads, programs)
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


def _estimated_time(blocks: Ints, chunks: Ints, heads: int, programs: int) -> float:
    """Estimate the kernel's time. The unit is the time in which a program reads a block.

    The estimate is the sum over the jobs of the busiest program, with one block added to each job for its start and
    end, and half a block for merging each part of a tile.
    """
    sizes = np.sort(np.repeat(-(-blocks // chunks), chunks))[::-1]
    merge = 0.5 * int(chunks.max()) if chunks.max() > 1 else 0.0
    return float((np.repeat(sizes, heads)[::programs] + 1).sum()) + merge


def _ranges(first: Ints, count: Ints) -> Ints:
    """Return the concatenation of the ranges first[i], first[i] + 1, .., first[i] + count[i] - 1."""
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
