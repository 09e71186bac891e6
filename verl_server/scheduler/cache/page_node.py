"""`PageNode`: one page of a prefix tree. The `RadixCache` owns the nodes, and `KeptPages` counts some of them."""

from __future__ import annotations

from verl_server.scheduler.cache.expected_return import EndedTurn

FREED = -1
"""`PageNode.page` of roots and of nodes whose page was freed."""


class PageNode:
    """One cached page. `key` has its tokens, which follow the tokens of the nodes above. A root has no page."""

    __slots__ = (
        "__weakref__",
        "children",
        "depth",
        "ended",
        "is_kept",
        "keep_until",
        "kept_children",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "page",
        "parent",
        "version",
        "waiters",
    )

    def __init__(
        self, key: tuple[int, ...], page: int, parent: PageNode | None, version: int, namespace: str = ""
    ) -> None:
        self.namespace: str = namespace if parent is None else parent.namespace
        self.key = key
        self.page = page
        self.parent = parent
        self.version = version
        self.children: dict[tuple[int, ...], PageNode] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Number of pages from the root to this node, including its own page."""
        self.lock_ref = 0
        """Number of requests that hold this node or a node below it."""
        self.last_access = 0
        self.keep_until = 0.0
        """Time of the planner's clock until which the page is likely to be used again."""
        self.is_kept = False
        """True if `KeptPages` counts the page."""
        self.kept_children = 0
        """Number of children that are kept."""
        self.waiters = 0
        """Number of waiting requests whose cached prefix ends here."""
        self.ended: EndedTurn | None = None
        """The turn whose history ends here, if the turn was not continued yet."""

    def worth(self) -> tuple[bool, float, int]:
        """Return the rank of a leaf for eviction. The smallest one is evicted first."""
        if self.waiters:
            return True, self.depth, self.last_access
        return False, self.keep_until, self.last_access
