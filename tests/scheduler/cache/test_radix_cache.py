"""The prefix tree alone: matching, sharing, locks, eviction order, versions."""

from __future__ import annotations

import random

import pytest

from verl_server.scheduler.cache.free_lists import PagePool
from verl_server.scheduler.cache.page_node import PageNode
from verl_server.scheduler.cache.radix_cache import RadixCache

PAGE = 4


def make(pages: int = 16) -> tuple[PagePool, RadixCache]:
    pool = PagePool(pages)
    return pool, RadixCache(pool, PAGE)


def insert(pool: PagePool, cache: RadixCache, tokens: list[int], namespace: str = "") -> PageNode:
    """Insert what a finished request leaves: its full pages, unlocked. Return the last node."""
    node = cache.match(tokens, len(tokens), namespace)
    cache.lock(node)
    count = len(tokens) // PAGE
    pages = cache.path_pages(node) + pool.alloc(count - node.depth)
    node, _ = cache.extend(node, tokens, pages, count)
    cache.unlock(node)
    return node


def test_match_finds_full_pages_within_the_limit() -> None:
    pool, cache = make()
    tokens = list(range(12))
    node = insert(pool, cache, tokens)
    assert cache.match(tokens, 12) is node and len(cache.path_pages(node)) == 3
    assert cache.match(tokens, 11).depth == 2, "the last token is not matched, because it must be computed"
    assert cache.match(tokens, 3).depth == 0
    assert cache.match([*tokens[:8], 99, 99, 99, 99], 12).depth == 2
    assert cache.match([99, *tokens[1:]], 12).depth == 0


def test_extend_swaps_pages_that_the_tree_has() -> None:
    pool, cache = make()
    tokens = list(range(8))
    insert(pool, cache, tokens)
    mine = pool.alloc(3)
    root = cache.match([], 0)
    cache.lock(root)
    node, swapped = cache.extend(root, [*tokens, 50, 51, 52, 53], mine, 3)
    pages = cache.path_pages(node)
    assert [index for index, _ in swapped] == [0, 1] and [page for _, page in swapped] == pages[:2]
    assert pages[2] == mine[2] and set(mine[:2]) <= set(pool.free_pages()), "the request's own copies were freed"
    cache.check_invariants([node])


def test_eviction_takes_unlocked_leaves_least_recently_used_first() -> None:
    pool, cache = make()
    old = insert(pool, cache, [1] * 8)
    new = insert(pool, cache, [2] * 8)
    held = insert(pool, cache, [3] * 8)
    cache.lock(held)
    cache.lock(old)
    cache.unlock(old)  # used again, so that it is younger than `new`
    assert cache.evict(1) == 1
    assert cache.match([2] * 8, 8).depth == 1 and new.page == -1, "a leaf is evicted before its parent"
    assert cache.evict(1) == 1 and cache.match([2] * 8, 8).depth == 0
    assert cache.evict(100) == 2, "everything except the held path"
    assert cache.match([3] * 8, 8) is held and cache.evictable == 0
    cache.check_invariants([held])


def test_a_long_held_page_is_young_when_its_holder_ends() -> None:
    pool, cache = make()
    held = insert(pool, cache, [1] * 4)
    cache.lock(held)
    insert(pool, cache, [2] * 4)
    cache.unlock(held)
    cache.evict(1)
    assert cache.match([1] * 4, 4) is held


def test_start_version_hides_old_pages_and_frees_them_with_their_last_holder() -> None:
    pool, cache = make(8)
    first = insert(pool, cache, [1] * 8)
    insert(pool, cache, [2] * 8)
    cache.lock(first)
    cache.lock(first)
    cache.start_version()
    assert cache.match([1] * 8, 8).depth == 0 and cache.match([2] * 8, 8).depth == 0
    assert (cache.evictable, cache.num_shareable, cache.detached) == (2, 0, 2)
    cache.check_invariants([first, first])
    assert cache.evict(8) == 2 and pool.available == 6
    with pytest.raises(AssertionError, match="older version"):
        cache.extend(first, [1] * 12, [*cache.path_pages(first), 7], 3)
    cache.unlock(first)
    assert pool.available == 6
    cache.start_version()  # a second update while the pages are still held
    cache.unlock(first)
    assert pool.available == 8 and cache.detached == 0
    cache.check_invariants([])


def test_older_versions_are_collected_before_anything_else_goes_and_no_page_twice() -> None:
    pool, cache = make(16)
    held = insert(pool, cache, [1] * 16)
    cache.lock(held)
    insert(pool, cache, [1] * 4 + [5] * 8)
    cache.start_version()
    cache.unlock(held)  # frees the pages of the old version before `evict` collects them
    assert pool.available == 14
    new = insert(pool, cache, [1] * 8)
    cache.start_version()
    young = insert(pool, cache, [3] * 8)
    cache.check_invariants([])
    assert cache.evict(1) == 1 and cache.evict(3) == 3, "from both older versions, as many as requested"
    assert new.page == -1 and cache.match([3] * 8, 8) is young
    assert sorted(pool.free_pages() + cache.path_pages(young)) == list(range(16))
    cache.check_invariants([])


def test_pages_that_a_waiting_request_wants_are_evicted_last_and_the_shortest_prefix_first() -> None:
    pool, cache = make()
    long, short = insert(pool, cache, [1] * 12), insert(pool, cache, [2] * 8)
    cache.want(long)
    cache.want(short)
    insert(pool, cache, [3] * 8)  # younger, but no request wants it
    cache.check_invariants([], [long, short])
    assert cache.evict(2) == 2 and cache.match([3] * 8, 8).depth == 0
    assert cache.evict(1) == 1 and cache.match([2] * 8, 8).depth == 1
    cache.check_invariants([], [long, short])  # the request that wanted `short` wants the page above it now
    assert cache.evict(1) == 1 and cache.match([2] * 8, 8).depth == 0 and cache.match([1] * 12, 12) is long
    cache.unwant(short)
    cache.unwant(long)
    insert(pool, cache, [4] * 4)
    assert cache.evict(1) == 1 and long.page == -1, "a page that nobody wants any more is evicted by its last use"
    cache.check_invariants([])


def keep(cache: RadixCache, node: PageNode, until: float) -> None:
    cache.lock(node)
    cache.unlock(node, until)


def test_pages_are_kept_until_their_time_and_evicted_in_its_order() -> None:
    pool, cache = make()
    nodes = [insert(pool, cache, [n] * 4) for n in (1, 2, 3)]
    for node, until in zip(nodes, (30.0, 10.0, 20.0), strict=True):
        keep(cache, node, until)
    assert cache.kept.count == 3
    cache.kept.expire(10.0)
    assert cache.kept.count == 2
    assert cache.evict(2) == 2 and [node.page == -1 for node in nodes] == [False, True, True]
    assert cache.kept.count == 1
    cache.want(nodes[0])
    cache.kept.expire(30.0)
    assert cache.kept.count == 1, "a waiting request wants it"
    cache.check_invariants([], [nodes[0]])
    cache.unwant(nodes[0])
    assert cache.kept.count == 0
    cache.check_invariants([])


def test_a_page_is_kept_as_long_as_one_below_it() -> None:
    pool, cache = make()
    long, short = insert(pool, cache, [1] * 4 + [5] * 8), insert(pool, cache, [1] * 4 + [6] * 4)
    keep(cache, long, 30.0)
    keep(cache, short, 10.0)  # the page that both share has this time now
    cache.kept.expire(20.0)
    assert cache.kept.count == 3, "the two pages of `long`, and the one above them"
    cache.check_invariants([])
    cache.lock(long)
    assert cache.kept.count == 0, "a page with a holder needs no other reason"
    cache.unlock(long, 40.0)
    cache.evict(2)  # `short`, and the end of `long`
    assert cache.kept.count == 2
    cache.check_invariants([])
    cache.kept.expire(40.0)
    assert cache.kept.count == 0, "the end of the history was evicted, the rest expires all the same"
    cache.check_invariants([])


def test_what_a_finished_history_shared_is_kept_until_its_time() -> None:
    pool, cache = make()
    other, finished = insert(pool, cache, [1] * 4 + [5] * 4), insert(pool, cache, [1] * 4 + [6] * 4)
    keep(cache, other, 10.0)
    keep(cache, finished, 20.0)
    cache.finish(finished)
    assert cache.kept.count == 2, "the other history and the page that both share"
    cache.kept.expire(10.0)
    assert cache.kept.count == 1
    cache.kept.expire(20.0)
    assert cache.kept.count == 0
    cache.check_invariants([])


def test_pages_of_an_older_version_are_not_kept() -> None:
    pool, cache = make()
    node, held = insert(pool, cache, [1] * 8), insert(pool, cache, [2] * 8)
    keep(cache, node, 30.0)
    cache.lock(held)
    cache.start_version()
    assert cache.kept.count == 0
    cache.unlock(held, 30.0)
    cache.kept.expire(40.0)
    assert cache.kept.count == 0
    cache.check_invariants([])


def test_a_finished_history_is_evicted_first_up_to_what_others_share() -> None:
    pool, cache = make()
    insert(pool, cache, [1] * 4 + [5] * 4)
    finished = insert(pool, cache, [1] * 4 + [6] * 8)
    cache.finish(finished)
    assert cache.evict(2) == 2 and finished.page == -1
    assert cache.match([1] * 4 + [5] * 4, 8).depth == 2, "older, but not finished"
    cache.finish(finished)  # its pages are gone
    cache.check_invariants([])


def test_a_known_match_is_continued_as_a_fresh_one_would_end() -> None:
    pool, cache = make(24)
    rng = random.Random(0)
    prompts = [[rng.randrange(2) for _ in range(24)] for _ in range(8)]
    known: list[PageNode | None] = [None] * len(prompts)
    for _ in range(400):
        tokens = rng.choice(prompts)[: rng.randrange(4, 25)]
        cache.evict(max(0, 8 - pool.available))
        insert(pool, cache, tokens)
        cache.evict(rng.choice([0, 0, 2, 5]))
        if rng.random() < 0.02:
            cache.start_version()
        for i in rng.sample(range(len(prompts)), 4):
            known[i] = cache.match(prompts[i], 24, known=known[i])
            assert known[i].depth == cache.match(prompts[i], 24).depth
            assert cache.path_pages(known[i]) == cache.path_pages(cache.match(prompts[i], 24))


def test_leaf_heap_stays_small_when_the_same_pages_are_used_again_and_again() -> None:
    pool, cache = make()
    node = insert(pool, cache, [1] * 8)
    for _ in range(5000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) < 200
    assert cache.evict(2) == 2 and pool.available == 16


def test_check_invariants_notices_a_lost_lock() -> None:
    pool, cache = make()
    node = insert(pool, cache, [1] * 8)
    cache.lock(node)
    with pytest.raises(AssertionError, match="locks"):
        cache.check_invariants([])
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(node)
        cache.unlock(node)


def test_namespaces_share_no_page() -> None:
    pool, cache = make()
    tokens = list(range(8))
    plain, salted = insert(pool, cache, tokens), insert(pool, cache, tokens, "salt")
    assert cache.match(tokens, 8) is plain and cache.match(tokens, 8, "salt") is salted
    assert not set(cache.path_pages(plain)) & set(cache.path_pages(salted))
    assert cache.match(tokens, 8, "other").depth == 0 and cache.num_namespaces == 2
    cache.check_invariants([])


def test_eviction_takes_the_oldest_page_of_any_namespace_and_drops_empty_namespaces() -> None:
    pool, cache = make()
    for namespace in ("a", "b", "c"):
        insert(pool, cache, [1] * 4, namespace)
    cache.evict(1)
    assert cache.num_namespaces == 2 and cache.match([1] * 4, 4, "a").depth == 0
    held = cache.match([1] * 4, 4, "b")
    cache.lock(held)
    assert cache.evict(100) == 1 and cache.num_namespaces == 1
    cache.check_invariants([held])
    cache.unlock(held)
    cache.evict(100)
    assert cache.num_namespaces == 0 and pool.available == 16


def test_a_namespace_without_pages_ends_with_its_last_holder() -> None:
    _, cache = make()
    root = cache.match([1] * 4, 4, "salt")
    assert cache.num_namespaces == 0, "a match alone adds nothing"
    cache.lock(root)
    cache.lock(cache.match([2] * 4, 4, "salt"))
    cache.check_invariants([root, root])
    cache.unlock(root)
    assert cache.num_namespaces == 1
    cache.unlock(root)
    assert cache.num_namespaces == 0


def test_a_new_version_keeps_nothing_of_the_namespaces_of_older_versions() -> None:
    pool, cache = make()
    for version in range(50):  # each version has a namespace of its own, and a request without pages that outlives it
        insert(pool, cache, [version] * 4, f"v{version}")
        root = cache.match([], 0, f"empty{version}")
        cache.lock(root)
        cache.start_version()
        assert cache.num_namespaces == 0 and cache.match([version] * 4, 4, f"v{version}").depth == 0
        cache.check_invariants([root])
        cache.unlock(root)
        cache.evict(1)
    assert pool.available == 16 and cache.num_namespaces == 0 and not list(cache.outdated())
    assert len(cache._outdated) <= 1
