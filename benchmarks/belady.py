"""Optimal eviction on a recorded run: the bound of every cache policy (Belady 1966).

A run is recorded as the pages that each request could reuse when it started, the pages that it left when it ended, and
the pages that running requests held in each step. `optimal_hits` plays the same requests in the same order with an
eviction that knows the future. Pages are numbered by their tokens and those before them (`PageNumbers`), so requests
share them exactly as in the prefix cache.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Access:
    """One entry of the record of a run."""

    kind: Literal["start", "end", "hold"]
    request: str = ""
    pages: Sequence[int] = ()
    """start: numbers of the pages that the request could reuse. end: those of the pages that it leaves."""
    held: int = 0
    """hold: number of the pages that running requests hold."""


@dataclass
class PageNumbers:
    """Numbers pages by the path to them."""

    page_size: int
    _numbers: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def of(self, token_ids: Sequence[int], count: int, known: Sequence[int] = ()) -> list[int]:
        """Return the numbers of the first `count` pages of `token_ids`, of which the first ones may be known."""
        size, numbers = self.page_size, list(known[:count])
        for start in range(len(numbers) * size, count * size, size):
            key = (numbers[-1] if numbers else -1, tuple(token_ids[start : start + size]))
            numbers.append(self._numbers.setdefault(key, len(self._numbers)))
        return numbers


def allowed_hits(accesses: Sequence[Access]) -> int:
    """Return the pages that a cache of any size would have had: those that an earlier request computed."""
    known: set[int] = set()
    hits = 0
    for access in accesses:
        if access.kind == "start":
            hits += sum(page in known for page in access.pages)
        known.update(access.pages)
    return hits


def optimal_hits(accesses: Sequence[Access], num_pages: int) -> int:
    """Return the pages that optimal eviction would have had at the starts of `accesses`.

    Running requests hold what they held in the run, and idle pages share the rest of the pool. The page is evicted
    whose next use is furthest. A page is used whenever one below it is, so pages below are evicted first.
    """
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(accesses) - 1, -1, -1):
        if accesses[index].kind == "start":
            for page in accesses[index].pages:
                uses[page].append(index)
    never = len(accesses)
    holders: Counter[int] = Counter()
    idle: dict[int, int] = {}
    """Idle page -> index of its next use."""
    furthest: list[tuple[int, int]] = []
    running: dict[str, Sequence[int]] = {}
    hits = 0

    def release(pages: Sequence[int]) -> None:
        for page in pages:
            if not holders[page]:
                idle[page] = following = uses[page][-1] if uses[page] else never
                heapq.heappush(furthest, (-following, -page))

    for access in accesses:
        if access.kind == "start":
            running[access.request] = access.pages
            for page in access.pages:
                uses[page].pop()
                hits += idle.pop(page, None) is not None or holders[page] > 0
                holders[page] += 1
        elif access.kind == "end":
            holders.subtract(running.pop(access.request))
            release(access.pages)
        while access.kind == "hold" and len(idle) > max(0, num_pages - access.held):
            following, page = heapq.heappop(furthest)
            if idle.get(-page) == -following:
                del idle[-page]
    return hits
