"""`Admission`: decides which waiting requests start in a step.

Owned by the `BatchPlanner`, which starts the requests that `admitted` yields. Requests start in the order of the
`WaitingQueue`, as long as pages and memory for steps suffice. Priority affects the queue only: no running request is
stopped for a waiting request, and a request of low priority waits as long as requests of higher priority arrive. With
`lpm`, if the pool cannot hold the histories of all episodes, running episodes end before new episodes begin: see
`_yields`. Admission is optimistic: see `Reserve`. `Admission` also bounds the memory that sampling takes beyond a plain
draw (penalties, filters, log-probabilities of many tokens), summed over the running requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verl_server.scheduler.cache.headroom import Headroom
from verl_server.scheduler.cache.page_node import PageNode
from verl_server.scheduler.cache.radix_cache import RadixCache
from verl_server.scheduler.reserve import Reserve
from verl_server.scheduler.schedule_batch import Req
from verl_server.scheduler.waiting_queue import WaitingQueue

_IDLE_SHARE = 0.5  # of the pool: while running requests hold less, steps are small, and new episodes need not yield
_MAX_SKIPPED = 256  # bound on the waiting requests that one step passes over because they cannot start yet

PageKey = tuple[int, tuple[int, ...]]


class Admission:
    """The rules of admission, which the module docstring describes, and the numbers that the rules need."""

    def __init__(
        self, waiting: WaitingQueue, cache: RadixCache, step_budget: int | None, clock: Callable[[], float]
    ) -> None:
        self._waiting, self._cache, self._clock = waiting, cache, clock
        self.step_budget = step_budget
        """Bound on the sum of `Req.step_bytes` of all running requests, None for no bound."""
        self.step_bytes = 0
        """Sum of `Req.step_bytes` of all running requests."""
        self.reserve = Reserve(cache.page_size)
        self.headroom = Headroom(cache.pool.num_pages)

    def admitted(
        self, running: Sequence[Req], only_started: bool, can_compute: Callable[[Req], int]
    ) -> Iterator[tuple[Req, PageNode]]:
        """Yield the waiting requests that may start in this step, each with the last node of its cached prefix.

        The caller starts each request, and plans its first chunk, before it takes the next one. `only_started` admits
        no request that was not started before. `can_compute` returns how many tokens of a request the step may compute.
        """
        waiting = self._waiting
        reserved = self.reserve.expected_pages(running)
        computing = {self._next_page(req) for req in running if req.prefilling}
        waiting.age()
        skipped = 0
        while skipped < len(waiting):
            req = waiting[skipped]
            if (only_started and not req.started) or can_compute(req) == 0:
                skipped += 1
            elif (node := waiting.rematch(skipped)) is None:
                continue  # another request is in this place now
            elif self._is_computed(req, node, computing) or self._yields(running, req, node, reserved):
                skipped += 1
            elif running and not self._has_room(req, node, reserved):
                return
            else:
                yield req, node
                reserved += self.reserve.expected_pages([req])
                computing.add(self._next_page(req))
            if skipped > _MAX_SKIPPED and not only_started:
                return

    def _is_computed(self, req: Req, node: PageNode, computing: set[PageKey]) -> bool:
        """Return True if a running prefill computes the request's next page, which follows the cached page `node`.

        Requests of one group arrive together. It is cheaper to wait for the prefill of the first request than to
        compute the prompt for each request. The wait is short, because prefills run oldest first.
        """
        if self._cache.disabled or req.reuse_limit() < (node.depth + 1) * self._cache.page_size:
            return False
        return self._page_key(node, req) in computing

    def _next_page(self, req: Req) -> PageKey:
        """Return the key of the page that a running prefill will share next through the prefix cache."""
        assert req.node is not None
        return self._page_key(req.node, req)

    def _page_key(self, node: PageNode, req: Req) -> PageKey:
        """Return the key of the page of `req` that follows `node`: (id of the node, tokens of the page)."""
        start = node.depth * self._cache.page_size
        return id(node), tuple(req.token_ids[start : start + self._cache.page_size])

    def _yields(self, running: Sequence[Req], req: Req, node: PageNode, reserved: int) -> bool:
        """Return True if a waiting request should not start yet, so that running episodes keep the pages that it needs.

        A request of which less than half is cached begins an episode, or continues an episode that lost its pages. Such
        a request may not take pages that will probably be used again soon, nor the headroom for the growth of running
        episodes. There are two exceptions: the request is overdue, or running requests would hold less than half of the
        pool. So histories stay in the cache until episodes end.
        """
        waiting, kept, num_pages = self._waiting, self._cache.kept, self._cache.pool.num_pages
        if not (running and waiting.by_prefix) or req.started or req.overdue or waiting.is_cached(req):
            return False
        available, need = self._cache.available_pages(), self._needed_pages(req, node) + reserved
        if num_pages - available + need <= _IDLE_SHARE * num_pages:
            return False
        kept.expire(self._clock())
        return need + self.headroom.pages > available - kept.count

    def _has_room(self, req: Req, node: PageNode, reserved: int) -> bool:
        """Return True if a waiting request fits: in the memory for sampling, and in pages that are free or can be
        evicted.

        The pages from the root to `node` are cached, and are not counted.
        """
        if self.step_budget is not None and self.step_bytes + req.step_bytes > self.step_budget:
            return False
        available, need = self._cache.available_pages(), self._needed_pages(req, node) + reserved
        return need <= available and need <= available - self._cache.num_idle(node)

    def _needed_pages(self, req: Req, node: PageNode) -> int:
        """Return the number of pages that a waiting request needs for its prompt and its reserve of sampled tokens.

        The pages from the root to `node` are cached, and are not counted.
        """
        return self.reserve.expected_pages([req]) - node.depth
