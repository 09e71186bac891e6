"""`RadixCache`: prefix trees over KV pages, so that equal prefixes are computed once.

Each namespace has a tree of its own, so requests of different namespaces share no page. A tree exists as long as it has
pages or a request holds its root, and no longer, because callers may use a new namespace for every weight version. All
trees share one limit: eviction ignores namespaces.

One node is one full page of tokens, so nodes never split. The `BatchPlanner` calls `match` and `lock` when it admits a
request, `extend` when pages of the request were computed, `unlock` when the request ends, and `evict` when pages run
out. A node that a request holds is locked with its whole path. Other nodes can be evicted, leaves first. Nodes that no
waiting request wants are evicted first, in the order of `PageNode.keep_until`, and of their last use if `keep_until` is
equal. Nodes that waiting requests want follow, the shortest prefix first.

`start_version` is called when the weights changed. It detaches all trees, so that no page of older weights can be
matched again. It visits the roots only, so its time does not depend on the number of pages. Detached pages without a
holder are collected when pages are needed, before any page of the current trees is evicted. Running requests keep the
detached pages that they hold until they unlock them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from verl_server.scheduler.cache.expected_return import ExpectedReturn
from verl_server.scheduler.cache.free_lists import PagePool
from verl_server.scheduler.cache.kept_pages import KeptPages
from verl_server.scheduler.cache.page_node import FREED, PageNode


class RadixCache:
    """The prefix trees of the current weight version, and the detached pages of older versions."""

    def __init__(
        self, pool: PagePool, page_size: int, disabled: bool = False, returns: ExpectedReturn | None = None
    ) -> None:
        """Create the cache. It reports to `returns` the turns whose pages were evicted before they were continued."""
        self._returns = ExpectedReturn() if returns is None else returns
        self.pool = pool
        self.page_size = page_size
        self.disabled = disabled
        self.version = 0
        self._roots: dict[str, PageNode] = {}
        """Root of each namespace of the current version. A root has children or a holder."""
        self.evictable = 0
        """Number of pages that no request holds: in the trees, and detached pages that were not collected yet."""
        self.protected = 0
        """Number of pages in the trees that a request holds."""
        self.detached = 0
        """Number of pages of older versions that a request still holds."""
        self.kept = KeptPages()
        """The pages that no request holds and that are likely to be used again."""
        self._tick = 0  # order of use is counted, not timed, so that every replay evicts the same pages
        self._pushes = 0
        self._leaves: list[tuple[tuple[bool, float, int], int, PageNode]] = []
        """Heap of (worth, number of the push, node). Entries become stale, and are checked when they are popped."""
        self._outdated: list[PageNode] = []
        """Nodes of older versions whose pages, and whose descendants' pages, were not collected yet."""
        self._uncollected = 0
        """Number of the pages at and below the nodes of `_outdated` that no request holds."""

    @property
    def num_pages(self) -> int:
        """Number of pages that are neither free nor owned by one request."""
        return self.evictable + self.protected + self.detached

    def available_pages(self) -> int:
        """Return the number of pages that are free or can be evicted."""
        return self.pool.available + self.evictable

    @property
    def num_shareable(self) -> int:
        """Number of pages in the trees, which new requests can share."""
        return self.evictable + self.protected - self._uncollected

    @property
    def num_namespaces(self) -> int:
        """Number of namespaces that have pages or a running request."""
        return len(self._roots)

    def match(
        self, token_ids: Sequence[int], limit: int, namespace: str = "", known: PageNode | None = None
    ) -> PageNode:
        """Return the deepest node of the namespace whose path equals a prefix of `token_ids[:limit]`.

        `known` is an earlier result for the same arguments. With `known`, only pages that the tree gained or lost since
        then are visited, so the time does not depend on the length of the prefix. The call does not change the cache.
        The root of a new namespace becomes part of the cache when it is locked.
        """
        node = self._remaining(known) or self._roots.get(namespace)
        if node is None:
            return PageNode((), FREED, None, self.version, namespace)
        if self.disabled:
            return node
        size = self.page_size
        for start in range(node.depth * size, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def _remaining(self, node: PageNode | None) -> PageNode | None:
        """Return the deepest node of the path to `node` that is still cached, None if there is none."""
        if node is None or node.version != self.version:
            return None
        while node is not None and node.page == FREED:  # a root has no page either
            node = node.parent
        return node

    def want(self, node: PageNode) -> None:
        """Count a waiting request whose cached prefix ends at `node`. Pages that no request wants are evicted first."""
        if node.parent is None:
            return
        node.waiters += 1
        if node.waiters == 1:
            self.kept.wanted(node)
            self._push_if_evictable(node)

    def unwant(self, node: PageNode) -> None:
        """Undo `want`.

        The node that was passed to `want` may have been evicted since; then `node` is a node above it.
        """
        left = self._remaining(node)
        if left is None:
            return
        left.waiters -= 1
        assert left.waiters >= 0, "a cached page was unwanted more often than wanted"
        if left.waiters == 0:
            self.kept.changed(left)
            self._push_if_evictable(left)

    def finish(self, node: PageNode) -> None:
        """Make the pages that only the path to `node` has the next pages that `evict` frees. Free no page now."""
        left = self._remaining(node)
        if left is None or left.children:
            return
        while left.parent is not None and len(left.children) <= 1 and not left.lock_ref and not left.waiters:
            left.keep_until, left.last_access = 0.0, 0
            self.kept.changed(left)
            self._push_if_evictable(left)
            left = left.parent

    def path_pages(self, node: PageNode) -> list[int]:
        """Return the page ids from the root to `node`."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def num_idle(self, node: PageNode) -> int:
        """Return the number of pages on the path to `node` that no request holds. They may be evicted until `lock`."""
        count = 0
        while not node.lock_ref and node.parent is not None:
            count += 1
            node = node.parent
        return count

    def lock(self, node: PageNode) -> None:
        """Protect `node` and all nodes above it from eviction until `unlock`."""
        assert node.version == self.version, "pages of an older version must not be used for a new request"
        self._tick += 1
        self.kept.held(node)
        tick, idle = self._tick, 0
        while (parent := node.parent) is not None:
            idle += not node.lock_ref
            node.lock_ref += 1
            node.last_access = tick
            node = parent
        self.evictable -= idle
        self.protected += idle
        node.lock_ref += 1
        self._roots[node.namespace] = node

    def unlock(self, node: PageNode, keep_until: float = 0.0) -> None:
        """Undo one `lock`. A page of an older version is freed when its last lock ends.

        `keep_until`: see `PageNode.keep_until`.
        """
        self._tick += 1
        freed, last = [], node
        while node.parent is not None:
            node.lock_ref -= 1
            assert node.lock_ref >= 0, "a cached page was unlocked more often than locked"
            node.last_access = self._tick
            node.keep_until = keep_until
            if node.lock_ref == 0:
                if node.version != self.version:
                    self.detached -= 1
                    freed.append(node.page)
                    node.page = FREED
                else:
                    self.protected -= 1
                    self.evictable += 1
                    self._push_if_evictable(node)
            node = node.parent
        if last.version == self.version:
            self.kept.released(last, keep_until)
        node.lock_ref -= 1
        self._drop_if_unused(node)
        self.pool.free(freed)

    def extend(
        self, node: PageNode, token_ids: Sequence[int], pages: list[int], count: int
    ) -> tuple[PageNode, list[tuple[int, int]]]:
        """Move pages `node.depth`..`count`-1 of a request that holds `node` into the tree.

        Return the node that the request now holds, and (index, page) for each page that the tree already had. The
        request's own copy of such a page was freed, and the request must use the returned page instead.
        """
        assert node.version == self.version, "pages of an older version must not enter the tree"
        size = self.page_size
        self._tick += 1
        swapped: list[tuple[int, int]] = []
        freed = []
        for index in range(node.depth, count):
            key = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = PageNode(key, pages[index], node, self.version)
                node.children[key] = child
                self.evictable += 1
            else:
                freed.append(pages[index])
                swapped.append((index, child.page))
            self._lock_one(child)
            node = child
        self.pool.free(freed)
        return node, swapped

    def evict(self, count: int) -> int:
        """Free up to `count` pages without a holder, and return the number of freed pages.

        Pages of older versions are freed first, then leaves in the order that the module docstring describes.
        """
        freed = self._collect(count)
        while len(freed) < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            if not _is_evictable(entry):
                continue
            node = entry[2]
            parent = node.parent
            assert parent is not None
            if node.ended is not None:
                self._returns.lost(node.ended)
            if parent.parent is not None:
                parent.waiters += node.waiters
            node.waiters = 0
            self.kept.evicted(node)
            freed.append(node.page)
            node.page = FREED
            del parent.children[node.key]
            self._push_if_evictable(parent)
            self._drop_if_unused(parent)
        self.evictable -= len(freed)
        self.pool.free(freed)
        return len(freed)

    def start_version(self) -> None:
        """Detach all trees.

        Pages without a holder can be evicted at once, the other pages when their last lock ends.
        """
        self._outdated.extend(root for root in self._roots.values() if root.children)
        self._uncollected = self.evictable
        self.detached += self.protected
        self.protected = 0
        self.version += 1
        self._roots = {}
        self.kept.clear()
        self._leaves.clear()

    def _collect(self, count: int) -> list[int]:
        """Remove up to `count` pages of older versions without a holder, and return them to be freed."""
        pages: list[int] = []
        while self._outdated and len(pages) < count:
            node = self._outdated.pop()
            self._outdated.extend(node.children.values())
            node.children = {}  # the children are in `_outdated` now
            if node.lock_ref == 0 and node.page != FREED:
                pages.append(node.page)
                node.page = FREED
        self._uncollected -= len(pages)
        return pages

    def nodes(self) -> Iterator[PageNode]:
        """Return all nodes of the current trees, without the roots."""
        return _below(self._roots.values())

    def outdated(self) -> Iterator[PageNode]:
        """Yield the nodes of older versions whose page is still to be collected."""
        left = [node for node in self._outdated if node.parent is not None]
        for node in itertools.chain(left, _below(self._outdated)):
            if node.lock_ref == 0 and node.page != FREED:
                yield node

    def check_invariants(self, holders: list[PageNode], wanted: Iterable[PageNode] = ()) -> None:
        """Assert that every lock belongs to one of `holders` and that the counts are right.

        `holders` has one node for each running request, `wanted` one for each waiting request that called `want`.
        """
        waiters: dict[int, int] = {}
        for node in wanted:
            left = self._remaining(node)
            if left is not None:
                waiters[id(left)] = waiters.get(id(left), 0) + 1
        locks: dict[int, int] = {}
        detached: dict[int, int] = {}
        for node in holders:
            while node.parent is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                if node.version != self.version:
                    assert node.page != FREED and node.lock_ref > 0, "a held page of an older version was freed"
                    detached[id(node)] = node.page
                node = node.parent
            locks[id(node)] = locks.get(id(node), 0) + 1
        evictable = protected = 0
        for node in self.nodes():
            expected = locks.get(id(node), 0)
            assert node.lock_ref == expected, f"a cached page has {node.lock_ref} locks, {expected} holders"
            assert node.page != FREED and node.version == self.version
            assert node.waiters == waiters.get(id(node), 0), "a cached page has a wrong number of waiting requests"
            self.kept.check(node)
            evictable += expected == 0
            protected += expected > 0
        for namespace, root in self._roots.items():
            assert root.namespace == namespace and root.version == self.version
            assert root.lock_ref == locks.get(id(root), 0), "the root of a namespace has a wrong number of holders"
            assert root.children or root.lock_ref, "an empty namespace was not dropped"
        kept = sum(node.is_kept for node in self.nodes())
        assert kept == self.kept.count, f"{kept} pages are kept, {self.kept.count} are counted"
        uncollected = sum(1 for _ in self.outdated())
        assert uncollected == self._uncollected, f"{uncollected} pages are outdated, {self._uncollected} are counted"
        evictable += uncollected
        counted = (evictable, protected, len(detached))
        found = (self.evictable, self.protected, self.detached)
        assert counted == found, f"(evictable, protected, detached) is {counted}, but {found} are counted"

    def _lock_one(self, node: PageNode) -> None:
        """Lock `node`, whose path is locked above it."""
        if node.lock_ref == 0:
            self.evictable -= 1
            self.protected += 1
            if node.is_kept:
                self.kept.held(node)
        node.lock_ref += 1
        node.last_access = self._tick

    def _drop_if_unused(self, node: PageNode) -> None:
        """Drop the tree of a namespace if `node` is its root and has neither pages nor holders."""
        if node.parent is None and not node.children and not node.lock_ref and node.version == self.version:
            del self._roots[node.namespace]

    def _push_if_evictable(self, node: PageNode) -> None:
        if node.parent is None or node.children or node.lock_ref or node.version != self.version:
            return
        if len(self._leaves) > 2 * self.evictable + 64:
            self._drop_stale_leaves()
        self._pushes += 1  # breaks ties, because nodes cannot be compared
        heapq.heappush(self._leaves, (node.worth(), self._pushes, node))

    def _drop_stale_leaves(self) -> None:
        self._leaves = [entry for entry in self._leaves if _is_evictable(entry)]
        heapq.heapify(self._leaves)


def _below(nodes: Iterable[PageNode]) -> Iterator[PageNode]:
    stack = [child for node in nodes for child in node.children.values()]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def _is_evictable(entry: tuple[tuple[bool, float, int], int, PageNode]) -> bool:
    worth, _, node = entry
    return node.page != FREED and not node.lock_ref and not node.children and node.worth() == worth
