"""`WaitingQueue`: the waiting requests in the order in which they start.

The `BatchPlanner` adds requests, walks through the queue from the front, and removes the requests that it starts.
Larger priorities come first. Within one priority, `fcfs` is the order of arrival. With `lpm` (longest prefix match) the
order is: requests that were started before; overdue requests, oldest first; requests that continue a cached history,
longest cached prefix first; other requests, longest cached prefix first. A prefix is matched when its request arrives.
Later checks visit only pages that the cache gained or lost.

A request becomes overdue when it has waited for `max_age`. But in each 64th part of `max_age`, only one request of each
priority becomes overdue, or a 256th of the requests that have waited so long. Otherwise, if more episodes begin than
can run, all requests would become overdue together. The order would then be the order of arrival, in which each request
evicts pages that the next request needs.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Literal

from verl_server.scheduler.cache.page_node import PageNode
from verl_server.scheduler.cache.radix_cache import RadixCache
from verl_server.scheduler.schedule_batch import Place, Req

SchedulePolicy = Literal["lpm", "fcfs"]

_OVERDUE_PARTS = 64
"""Number of parts of `max_age`. In each part, one request of each priority may become overdue."""
_OVERDUE_SHARE = 256
"""If more requests than this number have waited for `max_age`, one of every `_OVERDUE_SHARE` of them becomes overdue in
each part of `max_age`.

So the last of 1,000 requests becomes overdue within 10 times `max_age`, instead of 17 times.
"""


class WaitingQueue:
    """Waiting requests, including retracted ones, in the order of `Req.place`."""

    def __init__(self, cache: RadixCache, policy: SchedulePolicy, max_age: float, clock: Callable[[], float]) -> None:
        """`max_age` is the number of seconds after which a request becomes overdue. `clock` returns seconds.

        If many requests have waited so long, the n-th of them becomes overdue at most n * `max_age` / 64 seconds later.
        """
        self._cache, self._max_age, self._clock = cache, max_age, clock
        self._next_overdue = -math.inf
        """Time before which no further request becomes overdue."""
        self.by_prefix = policy == "lpm"
        self._reqs: list[Req] = []
        self._young: dict[int, OrderedDict[Req, float]] = {}
        """Priority -> (request that is not overdue, time when it was queued), in the order of this time."""

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def __getitem__(self, index: int) -> Req:
        return self._reqs[index]

    def match(self, req: Req) -> None:
        """Find and protect the cached prefix of a new request, if the queue's order depends on prefixes."""
        if self.by_prefix:
            self._match(req)

    def add(self, req: Req) -> None:
        """Queue a request. Call `match` for the request first."""
        req.overdue = False
        if self.by_prefix:
            self._young.setdefault(req.priority, OrderedDict())[req] = self._clock()
        self._insert(req)

    def remove(self, req: Req) -> None:
        """Remove a request that starts or ends."""
        del self._reqs[self._index(req)]
        self._forget_wait(req)
        if self.by_prefix and req.match is not None:
            self._cache.unwant(req.match)
        req.match = None

    def rematch(self, index: int) -> PageNode | None:
        """Match the cached prefix of the request at `index` again.

        Return its last node, or None if the request moved back in the queue, because a part of its prefix was evicted.
        If the prefix has become longer, the request moves forward, and the others keep their order and their number.
        """
        req = self._reqs[index]
        if not self.by_prefix:
            req.match = self._cache.match(req.token_ids, req.reuse_limit(), req.namespace, req.match)
            return req.match
        self._match(req)
        before = req.place
        if self._place(req) != before:
            del self._reqs[index]
            self._insert(req)
        return req.match if req.place <= before else None

    def is_cached(self, req: Req) -> bool:
        """Return True if at least half of the request's tokens are cached and belong to the request's own history.

        A cached prompt that several requests share, such as a system prompt or the prompt of a group, is no history.
        """
        node = req.match
        if node is None or 2 * node.depth * self._cache.page_size < len(req.token_ids):
            return False
        return req.turn > 0 or len(node.children) <= 1

    def age(self) -> None:
        """Move requests that have waited for too long to the front of their priority."""
        now = self._clock()
        if now < self._next_overdue:
            return
        due = now - self._max_age
        for young in list(self._young.values()):
            waited = [req for req, _ in itertools.takewhile(lambda item: item[1] <= due, young.items())]
            if waited:
                self._next_overdue = now + self._max_age / _OVERDUE_PARTS
            for req in waited[: math.ceil(len(waited) / _OVERDUE_SHARE)]:
                self._forget_wait(req)
                del self._reqs[self._index(req)]
                req.overdue = True
                self._insert(req)

    def start_version(self) -> None:
        """Forget all cached prefixes, because no page of the older version may be used."""
        for req in self._reqs:
            req.match = None
        if self.by_prefix:
            for req in self._reqs:
                self._match(req)
                req.place = self._place(req)
            self._reqs.sort(key=_place)

    def check_invariants(self) -> list[PageNode]:
        """Assert that the queue is in order. Return the node of each request whose prefix is protected."""
        assert all(a.place < b.place for a, b in itertools.pairwise(self._reqs)), "the queue is not in order"
        young = {req for req in self._reqs if not req.overdue} if self.by_prefix else set()
        assert young == set().union(*self._young.values()), "a waiting request does not age"
        assert all(self._young.values()), "a priority without requests is remembered"
        return [req.match for req in self._reqs if req.match is not None] if self.by_prefix else []

    def _match(self, req: Req) -> None:
        before = req.match
        req.match = self._cache.match(req.token_ids, req.reuse_limit(), req.namespace, before)
        if req.match is not before:
            self._cache.want(req.match)  # first, so that the pages of both paths stay kept
            if before is not None:
                self._cache.unwant(before)

    def _forget_wait(self, req: Req) -> None:
        """Remove the time at which the request was queued."""
        young = self._young.get(req.priority)
        if young is not None and young.pop(req, None) is not None and not young:
            del self._young[req.priority]

    def _insert(self, req: Req) -> None:
        req.place = self._place(req)
        bisect.insort(self._reqs, req, key=_place)

    def _index(self, req: Req) -> int:
        return bisect.bisect_left(self._reqs, req.place, key=_place)

    def _place(self, req: Req) -> Place:
        if not self.by_prefix:
            return -req.priority, False, False, False, 0, False, req.arrival
        first = req.overdue or req.started
        depth = 0 if req.match is None or first else req.match.depth
        is_cached = first or self.is_cached(req)
        return -req.priority, not req.started, not req.overdue, not is_cached, -depth, not req.turn, req.arrival


def _place(req: Req) -> Place:
    return req.place
