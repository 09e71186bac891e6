"""Runs of shared keys are found, and the work on them is planned without gaps or repetition."""

from __future__ import annotations

import numpy as np
import pytest

from verl_server.kernels import shared_keys
from verl_server.kernels.shared_keys import LEVELS, Runs, find_runs, plan_items

PAGE = 4


def table(*rows: str) -> np.ndarray:
    """Return a table with a page for each letter. Missing pages are page 0, as in rows that are used again."""
    columns = max(map(len, rows))
    return np.array([[ord(letter) for letter in row] + [0] * (columns - len(row)) for row in rows], dtype=np.int64)


def found(runs: Runs) -> set[tuple[frozenset[int], int, int, int]]:
    """Return (entries, first key, end, level) of each run."""
    parts = zip(runs.first, runs.count, runs.begin, runs.end, runs.level, strict=True)
    return {(frozenset(runs.order[f : f + n].tolist()), int(b), int(e), int(lv)) for f, n, b, e, lv in parts}


def runs_of(*rows: str, least: int = PAGE, spare: int = 1) -> Runs:
    """Return the runs of `rows`. The last page of each row holds `spare` tokens, all other pages are full."""
    lens = np.array([PAGE * (len(row) - 1) + spare for row in rows])
    return find_runs(table(*rows), np.arange(len(rows)), lens, PAGE, least)


def most_saved(pages: np.ndarray, whole: np.ndarray, entries: list[int], agreed: int, begin: int, levels: int) -> int:
    """Return how many page reads at most `levels` further runs of these entries can save.

    The entries have their first `agreed` pages in common. The next run starts at page `begin`.
    """
    if len(entries) < 2 or not levels:
        return 0
    longer = [entry for entry in entries if whole[entry] > agreed]
    groups = [
        [entry for entry in longer if pages[entry, agreed] == page] for page in {pages[e, agreed] for e in longer}
    ]
    further = sum(most_saved(pages, whole, group, agreed + 1, begin, levels) for group in groups)
    if agreed == begin:
        return further
    return max(
        further, (len(entries) - 1) * (agreed - begin) + most_saved(pages, whole, entries, agreed, agreed, levels - 1)
    )


def test_entries_that_share_nothing_have_no_runs() -> None:
    runs = runs_of("abc", "def", "ghi")
    assert not found(runs) and runs.saved == 0
    starts, levels = runs.per_entry()
    assert not starts.any() and not levels.any()


def test_a_group_is_found_wherever_its_entries_are() -> None:
    runs = runs_of("abcx", "defg", "abcy", "abcz")
    assert found(runs) == {(frozenset({0, 2, 3}), 0, 12, 0)}
    assert runs.saved == 24
    starts, levels = runs.per_entry()
    assert starts.tolist() == [12, 0, 12, 12] and levels.tolist() == [1, 0, 1, 1]


def test_groups_below_a_common_prefix() -> None:
    runs = runs_of("sabx", "saby", "scdx", "scdy", "sefg", "other")
    assert found(runs) == {
        (frozenset({0, 1, 2, 3, 4}), 0, 4, 0),
        (frozenset({0, 1}), 4, 12, 1),
        (frozenset({2, 3}), 4, 12, 1),
    }
    starts, levels = runs.per_entry()
    assert starts.tolist() == [12, 12, 12, 12, 4, 0] and levels.tolist() == [2, 2, 2, 2, 1, 0]


def test_a_short_common_prefix_is_read_with_the_groups() -> None:
    runs = runs_of("sabx", "saby", "scdx", "scdy", least=8)
    assert found(runs) == {(frozenset({0, 1}), 0, 12, 0), (frozenset({2, 3}), 0, 12, 0)}


def test_of_more_than_two_levels_those_that_save_most_are_read() -> None:
    """A task prompt that is shorter than system prompt and questions is read with its questions."""
    task = [f"sst{question * 9}{sample}" for question in "ab" for sample in "123"]
    other = [f"ssu{question * 9}{sample}" for question in "cd" for sample in "123"]
    assert found(runs_of(*task, *other)) == {
        (frozenset(range(12)), 0, 8, 0),
        *((frozenset(range(first, first + 3)), 8, 48, 1) for first in range(0, 12, 3)),
    }


def test_a_prefix_that_saves_little_is_read_with_what_follows() -> None:
    assert found(runs_of("abbbbcccc1", "abbbbcccc2", "abbbbdddd3", "abbbbdddd4", "ae5")) == {
        (frozenset({0, 1, 2, 3}), 0, 20, 0),
        (frozenset({0, 1}), 20, 36, 1),
        (frozenset({2, 3}), 20, 36, 1),
    }


def test_a_chain_is_cut_where_it_saves_most() -> None:
    runs = runs_of("abcdefx", "abcdefy", "abcdew", "abcdv", "abcu", "abt", "as")
    assert {level for *_, level in found(runs)} == {0, 1}
    assert runs.saved == PAGE * (5 * 2 + 3 * 2), "two pages of six entries, then two of four"


@pytest.mark.parametrize(("spare", "end"), [(1, 8), (PAGE, 8)])
def test_the_newest_token_is_never_shared(spare: int, end: int) -> None:
    """Pages that are still written are never shared, even if two rows of the table list the same page."""
    assert found(runs_of("abc", "abc", spare=spare)) == {(frozenset({0, 1}), 0, end, 0)}


def test_pages_beyond_a_length_mean_nothing() -> None:
    runs = find_runs(table("abcd", "abcd"), np.arange(2), np.array([6, 14]), PAGE, PAGE)
    assert found(runs) == {(frozenset({0, 1}), 0, 4, 0)}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_shared(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In random trees, a run's entries share its pages, runs follow each other, and no others would save more."""
    monkeypatch.setattr(shared_keys, "_MAX_DEPTH", 6)
    rng = np.random.default_rng(seed)
    rows = [list(rng.integers(1, 3, 6)) for _ in range(12)]
    pages = np.array([[int("".join(map(str, row[: i + 1]))) for i in range(6)] for row in rows], dtype=np.int64)
    lens = rng.integers(1, 6 * PAGE + 1, len(rows))
    runs = find_runs(np.concatenate([np.zeros_like(pages), pages]), len(rows) + np.arange(len(rows)), lens, PAGE, PAGE)
    reached = np.zeros(len(rows), dtype=np.int64)
    for entries, begin, end, _ in sorted(found(runs), key=lambda run: run[3]):
        assert len(entries) >= 2 and begin < end and begin % PAGE == end % PAGE == 0
        for entry in entries:
            assert reached[entry] == begin and end < lens[entry]
            reached[entry] = end
        assert len(np.unique(pages[list(entries), : end // PAGE], axis=0)) == 1
    assert runs.per_entry()[0].tolist() == reached.tolist()
    assert runs.saved == PAGE * most_saved(pages, (lens - 1) // PAGE, list(range(len(rows))), 0, 0, LEVELS)


@pytest.mark.parametrize("slots", [0, 7, 1000])
@pytest.mark.parametrize("heads", [1, 8])
def test_every_key_of_every_entry_is_dealt_out_once(slots: int, heads: int) -> None:
    none = np.zeros(3, dtype=np.int64)
    count, begin = np.array([40, 2, 9]), np.array([0, 16, 0])
    runs = Runs(np.arange(51), np.array([0, 40, 42]), count, begin, begin + np.array([1000, 20, 4096]), none)
    items = plan_items(runs, tile=16, grain=64, heads=heads, programs=24, slots=slots)
    seen = {(place, key): 0 for f, n, b, e in zip(runs.first, count, begin, runs.end, strict=True)
            for place in range(f, f + n) for key in range(b, e)}  # fmt: skip
    used = set()
    for first, number, low, high, _, chunks, slot, chunk in items.tolist():
        assert 1 <= number <= 16 and 0 <= chunk < chunks
        if chunks > 1:
            used.add(slot + chunk)
        for place in range(first, first + number):
            for key in range(low, high):
                seen[place, key] += 1
    assert set(seen.values()) == {1}
    assert len(used) == int((items[:, 5] > 1).sum()), "two chunks have one slot"
    assert max(used, default=-1) < slots
    lengths = items[:, 3] - items[:, 2]
    assert (np.diff(lengths) <= 0).all(), "the longest jobs come first"
    assert (slots < 1000) == (int(items[:, 5].max()) == 1) or slots == 7
