"""Optimal eviction on records by hand, and on random ones against a search of all choices."""

from __future__ import annotations

import random

import pytest

from benchmarks.belady import Access, PageNumbers, allowed_hits, optimal_hits


def start(request: str, pages: list[int]) -> Access:
    return Access("start", request, pages)


def end(request: str, pages: list[int]) -> Access:
    return Access("end", request, pages)


def hold(held: int = 0) -> Access:
    return Access("hold", held=held)


def test_the_history_that_is_used_first_is_kept() -> None:
    a, b, c = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
    turns = [start(name, []) for name in "abc"]
    ends = [end(name, pages) for name, pages in zip("abc", (a, b, c), strict=True)]
    again = [start("c2", c), start("a2", a)]
    accesses = [*turns, *ends, hold(), *again]
    assert allowed_hits(accesses) == 8
    assert optimal_hits(accesses, 12) == 8, "b does not return"
    assert optimal_hits(accesses, 6) == 6, "a returns last, and loses its last two pages"
    assert optimal_hits([*turns, *ends, hold(4), *again], 6) == 2, "running requests hold four pages"


def test_shared_pages_are_held_as_long_as_any_request_holds_them() -> None:
    accesses = [start("a", [0, 1]), start("b", [0, 2]), end("a", [0, 1]), hold(2), start("c", [0, 1])]
    assert optimal_hits(accesses, 3) == 3, "b starts beside a and reads its first page; c reads both"
    assert optimal_hits(accesses, 2) == 2, "page 1 is evicted, page 0 is held by b"


def test_pages_have_the_same_number_if_they_and_those_before_them_have_the_same_tokens() -> None:
    numbers = PageNumbers(2)
    first = numbers.of([1, 1, 2, 2, 3], 2)
    assert numbers.of([1, 1, 2, 2, 4, 4], 3, first)[:2] == first
    assert numbers.of([5, 5, 2, 2], 2) == [3, 4], "the same tokens behind others"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_eviction_has_more_hits(seed: int) -> None:
    """Requests of one page each, one after the other, so that all evictions can be tried."""
    rng = random.Random(seed)
    pages = [rng.randrange(5) for _ in range(9)]
    accesses = []
    for i, page in enumerate(pages):
        accesses += [start(str(i), [page]), end(str(i), [page]), hold()]

    def most(i: int, cached: frozenset[int]) -> int:
        if i == len(pages):
            return 0
        hit = pages[i] in cached
        held = cached | {pages[i]}
        choices = [held] if len(held) <= 2 else [held - {page} for page in held]
        return hit + max(most(i + 1, frozenset(choice)) for choice in choices)

    assert optimal_hits(accesses, 2) == most(0, frozenset())
