"""KV pages and page-table rows: who may write where.

Owned by the `BatchPlanner`. Both pools hand out plain integers; the tensors behind them belong to the
`ModelRunner`, which learns about assignments through `ForwardBatch.page_updates`. Every page is free, in the
prefix cache, or owned by exactly one running request.
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


class ReqToTokenPool:
    """Rows of the page table: one for each running request."""

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
