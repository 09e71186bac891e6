"""Free lists of the pages of the KV pool, and of the rows of the page table.

The `BatchPlanner` allocates both. The `RadixCache` frees the pages that it evicts.
"""

from __future__ import annotations


class PagePool:
    """Free list of KV pages 0..num_pages-1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Remove `count` pages from the free list and return them. The caller has checked that enough are free."""
        assert count <= len(self._free), f"{count} KV pages were requested, but {len(self._free)} are free"
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)

    def free_pages(self) -> list[int]:
        """Return a copy of the free list, for `check_invariants`."""
        return list(self._free)


class PageTableRows:
    """The free rows of the page table. Each running request holds one row."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)
