"""`KeptPages`: counts the cached pages without a holder that are likely to be used again.

A page is kept as long as one of these reasons holds: a turn is likely to continue its history (`keep_until` has not
passed), a waiting request wants the page, or a page below it is kept. The `RadixCache` reports the changes of its
pages. The `BatchPlanner` reads `count` before it starts a request whose pages would displace kept pages. A change takes
no longer than the walk along the path that the cache makes for the same change.
"""

from __future__ import annotations

import heapq

from verl_server.scheduler.cache.page_node import PageNode


class KeptPages:
    """The kept pages of the current trees."""

    def __init__(self) -> None:
        self.count = 0
        """Number of kept pages."""
        self._now = 0.0
        self._expiries: list[tuple[float, int, PageNode]] = []
        """Heap of (time, number of the push, last page of a history that was kept until then)."""
        self._pushes = 0

    def released(self, node: PageNode, until: float) -> None:
        """Record that a request no longer holds the path to `node`.

        `until` is the new `keep_until` of the path's pages.
        """
        if until > self._now and node.parent is not None:
            self._pushes += 1
            heapq.heappush(self._expiries, (until, self._pushes, node))
        is_kept, count = until > self._now, 0
        while (parent := node.parent) is not None and not node.lock_ref:
            is_kept = is_kept or node.kept_children > 0 or node.waiters > 0
            if is_kept:
                node.is_kept = True
                parent.kept_children += 1
                count += 1
            node = parent
        self.count += count

    def held(self, node: PageNode) -> None:
        """Record that a request holds the path to `node`, so that no page of the path counts as kept.

        The kept pages of a path are consecutive. Above them are only pages that a request held before.
        """
        while node.parent is not None and not node.is_kept:
            node = node.parent
        count = 0
        while (parent := node.parent) is not None and node.is_kept:
            node.is_kept = False
            parent.kept_children -= 1
            count += 1
            node = parent
        self.count -= count

    def evicted(self, node: PageNode) -> None:
        """Record that the page of `node` was freed.

        Its `waiters`, the waiting requests whose cached prefix ended at this page, already count at its parent.
        """
        if node.is_kept:
            self._forget(node)
            self.changed(node.parent)

    def wanted(self, node: PageNode) -> None:
        """Record that a waiting request wants `node`, and therefore the whole path to it."""
        at: PageNode | None = node
        while at is not None and at.parent is not None and not at.is_kept and not at.lock_ref:
            self._keep(at)
            at = at.parent

    def changed(self, node: PageNode | None) -> None:
        """Record that a reason to keep `node` has ended. Remove the pages of its path that have no reason left."""
        while node is not None and node.is_kept:
            if node.keep_until > self._now or node.kept_children or node.waiters:
                return
            self._forget(node)
            node = node.parent

    def expire(self, now: float) -> None:
        """Forget the pages that are not likely to be used any more. `now`: time of the planner's clock."""
        self._now = max(self._now, now)
        while self._expiries and self._expiries[0][0] <= self._now:
            node: PageNode | None = heapq.heappop(self._expiries)[2]
            while node is not None and not node.is_kept:  # the end of the history was evicted or finished
                node = node.parent
            self.changed(node)

    def clear(self) -> None:
        """Forget all pages, because they belong to an older version."""
        self.count = 0
        self._expiries.clear()

    def check(self, node: PageNode) -> None:
        """Assert that `node` is kept if and only if there is a reason."""
        assert node.kept_children == sum(child.is_kept for child in node.children.values())
        reasons = node.keep_until > self._now or node.kept_children > 0 or node.waiters > 0
        assert node.is_kept == (not node.lock_ref and reasons), f"a page is kept: {node.is_kept}, reasons: {reasons}"

    def _keep(self, node: PageNode) -> None:
        assert node.parent is not None
        node.is_kept = True
        node.parent.kept_children += 1
        self.count += 1

    def _forget(self, node: PageNode) -> None:
        assert node.parent is not None
        node.is_kept = False
        node.parent.kept_children -= 1
        self.count -= 1
