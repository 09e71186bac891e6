"""`RadixCache`: a prefix tree over KV pages, so that equal prefixes are computed once.

One node is one full page of tokens, so nodes never split. Used by the `BatchPlanner`: `match` at admission,
`extend` when pages of a request were computed, `lock`/`unlock` around a request's life, `evict` under memory
pressure. A node that some request holds keeps its whole path locked; all others can be evicted, leaves first,
least recently used first.

`start_version` is called when the weights changed: the whole tree is detached, so that no page computed under
older weights can be matched again. That takes no time, however large the tree: the pages that nobody holds are
collected when they are needed, before any page of the current tree is evicted. Pages that running requests still hold
stay theirs until they let go.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

_FREED = -1


class PagePool:
    """Free list of KV pages 0..num_pages-1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages; the caller has made sure that they are there."""
        assert count <= len(self._free), f"asked for {count} KV pages, {len(self._free)} are free"
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)

    def free_pages(self) -> list[int]:
        """A copy of the free list, for `check_invariants`."""
        return list(self._free)


class PageNode:
    """One cached page: the tokens in it, given all the tokens above it."""

    __slots__ = ("children", "depth", "key", "last_access", "lock_ref", "page", "parent", "version")

    def __init__(self, key: tuple[int, ...], page: int, parent: PageNode | None, version: int) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.version = version
        self.children: dict[tuple[int, ...], PageNode] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages from the root to here, this one included."""
        self.lock_ref = 0
        """Requests that hold this node or one below it."""
        self.last_access = 0


class RadixCache:
    """Prefix tree of one weight version, and what older versions left behind in running requests."""

    def __init__(self, pool: PagePool, page_size: int, disabled: bool = False) -> None:
        self.pool = pool
        self.page_size = page_size
        self.disabled = disabled
        self.version = 0
        self.root = PageNode((), _FREED, None, self.version)
        self.evictable = 0
        """Pages that no request holds: in the tree, and those of older versions that were not collected yet."""
        self.protected = 0
        """Pages in the tree that some request holds."""
        self.detached = 0
        """Pages of older versions that some request still holds."""
        self._tick = 0  # least recently used by counter, not by clock: every run replays alike
        self._pushes = 0
        self._leaves: list[tuple[int, int, PageNode]] = []  # heap; entries go stale and are checked when popped
        self._outdated: list[PageNode] = []
        """Nodes of older versions, below which everything is still to be collected."""
        self._uncollected = 0
        """Pages there that nobody holds."""

    @property
    def num_pages(self) -> int:
        """Pages that are neither free nor a request's own."""
        return self.evictable + self.protected + self.detached

    @property
    def num_shareable(self) -> int:
        """Pages that a new request could be given: those in the tree."""
        return self.evictable + self.protected - self._uncollected

    def match(self, token_ids: Sequence[int], limit: int) -> PageNode:
        """Deepest node whose path equals a prefix of `token_ids[:limit]`. Changes nothing."""
        node = self.root
        size = self.page_size
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def path_pages(self, node: PageNode) -> list[int]:
        """Page ids from the root to `node`."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def lock(self, node: PageNode) -> None:
        """Keep `node` and all above it from being evicted, until `unlock`."""
        self._tick += 1
        while node.parent is not None:
            self._lock_one(node)
            node = node.parent

    def unlock(self, node: PageNode) -> None:
        """Undo one `lock`. A page of an older version is freed with its last holder."""
        self._tick += 1
        freed = []
        while node.parent is not None:
            node.lock_ref -= 1
            assert node.lock_ref >= 0, "a cached page was unlocked more often than locked"
            node.last_access = self._tick
            if node.lock_ref == 0:
                if node.version != self.version:
                    self.detached -= 1
                    freed.append(node.page)
                    node.page = _FREED
                else:
                    self.protected -= 1
                    self.evictable += 1
                    self._push_if_evictable(node)
            node = node.parent
        self.pool.free(freed)

    def extend(
        self, node: PageNode, token_ids: Sequence[int], pages: list[int], count: int
    ) -> tuple[PageNode, list[tuple[int, int]]]:
        """Hand pages `node.depth`..`count`-1 of a request that holds `node` over to the tree.

        Returns the node that the request now holds, and (index, page) for pages that the tree had already: the
        caller's own copy was freed and it must use the tree's page from now on.
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
        """Free up to `count` pages that nobody holds, older versions first, then the least recently used leaves.

        Returns how many.
        """
        freed = self._collect(count)
        while len(freed) < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            if not _is_evictable(entry):
                continue
            node = entry[2]
            parent = node.parent
            assert parent is not None
            freed.append(node.page)
            node.page = _FREED
            del parent.children[node.key]
            self._push_if_evictable(parent)
        self.evictable -= len(freed)
        self.pool.free(freed)
        return len(freed)

    def start_version(self) -> None:
        """Detach everything: unheld pages can be had at once, held ones when their last holder lets go."""
        self._outdated.append(self.root)
        self._uncollected = self.evictable
        self.detached += self.protected
        self.protected = 0
        self.version += 1
        self.root = PageNode((), _FREED, None, self.version)
        self._leaves.clear()

    def _collect(self, count: int) -> list[int]:
        """Up to `count` pages of older versions that nobody holds; they are the caller's now."""
        pages: list[int] = []
        while self._outdated and len(pages) < count:
            node = self._outdated.pop()
            self._outdated.extend(node.children.values())
            node.children = {}  # nobody walks down here again
            if node.lock_ref == 0 and node.page != _FREED:
                pages.append(node.page)
                node.page = _FREED
        self._uncollected -= len(pages)
        return pages

    def nodes(self) -> Iterator[PageNode]:
        """All nodes of the current tree, the root excepted."""
        return _below([self.root])

    def outdated(self) -> Iterator[PageNode]:
        """Nodes of older versions whose page is still to be collected."""
        left = [node for node in self._outdated if node.parent is not None]
        for node in itertools.chain(left, _below(self._outdated)):
            if node.lock_ref == 0 and node.page != _FREED:
                yield node

    def check_invariants(self, holders: list[PageNode]) -> None:
        """Every lock belongs to one of `holders` (one node for each running request), and the counts agree."""
        locks: dict[int, int] = {}
        detached: dict[int, int] = {}
        for node in holders:
            while node.parent is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                if node.version != self.version:
                    assert node.page != _FREED and node.lock_ref > 0, "a held page of an older version was freed"
                    detached[id(node)] = node.page
                node = node.parent
        evictable = protected = 0
        for node in self.nodes():
            expected = locks.get(id(node), 0)
            assert node.lock_ref == expected, f"a cached page has {node.lock_ref} locks, {expected} holders"
            assert node.page != _FREED and node.version == self.version
            evictable += expected == 0
            protected += expected > 0
        uncollected = sum(1 for _ in self.outdated())
        assert uncollected == self._uncollected, f"{uncollected} pages are outdated, accounted {self._uncollected}"
        evictable += uncollected
        counted = (evictable, protected, len(detached))
        kept = (self.evictable, self.protected, self.detached)
        assert counted == kept, f"(evictable, protected, detached) is {counted}, accounted {kept}"

    def _lock_one(self, node: PageNode) -> None:
        if node.lock_ref == 0:
            self.evictable -= 1
            self.protected += 1
        node.lock_ref += 1
        node.last_access = self._tick

    def _push_if_evictable(self, node: PageNode) -> None:
        if node.parent is None or node.children or node.lock_ref:
            return
        if len(self._leaves) > 2 * self.evictable + 64:
            self._drop_stale_leaves()
        self._pushes += 1  # breaks ties: nodes do not compare
        heapq.heappush(self._leaves, (node.last_access, self._pushes, node))

    def _drop_stale_leaves(self) -> None:
        self._leaves = [entry for entry in self._leaves if _is_evictable(entry)]
        heapq.heapify(self._leaves)


def _below(nodes: Iterable[PageNode]) -> Iterator[PageNode]:
    stack = [child for node in nodes for child in node.children.values()]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def _is_evictable(entry: tuple[int, int, PageNode]) -> bool:
    tick, _, node = entry
    return node.page != _FREED and not node.lock_ref and not node.children and node.last_access == tick
