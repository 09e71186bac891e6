"""`Placement`: chooses the server of a request among those that may get it.

A conversation stays where it was, because its cache is there. A new prompt goes where its beginning was seen, if at
least half of it was. Both give way when that server has much more work than the least loaded one: with strict
stickiness the hits of others fell from 98 to 5 % (prime-rl #3255), and plain hashing took 12 % longer than looking at
caches (NeMo Gym #2570). What is left goes to the least loaded server, by tokens in flight as a share of its cache.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from verl_server.fleet.members import Member
from verl_server.fleet.prefixes import PrefixIndex
from verl_server.fleet.recent import Recent
from verl_server.fleet.requests import RoutedRequest

REASONS = ("conversation", "prefix", "load", "spilled", "key")
"""Why a server was chosen: it has the conversation; it has the beginning of the prompt; it has the least work; it has
the least work, and the server with the cache has too much; an Idempotency-Key chose it."""
_SPILL_RATIO = 1.5
_CONVERSATION_MARGIN = 2.0
"""A conversation that moves leaves its whole cache behind, so its margin is larger than that of a new prompt."""
_BEGINNING_MARGIN = 0.25
"""A beginning that many prompts share is soon in each cache, and then no reason to prefer one of them."""
_LEAST_SHARE = 0.5
"""Share of a prompt's blocks that a server must have seen to be preferred."""
_MOST_NAMES = 200_000
"""Conversations and idempotency keys that are remembered."""
_SESSION_TOKENS = 4096
"""Tokens that a new session counts as until its turns run. Sessions stay where they begin, so a hundred that are
created at once must not all go to the server that has the least work at that moment."""
_SESSION_SECONDS = 30.0
_CREATES = ("/sessions", "/open_session")


class Placement:
    def __init__(self, spill_margin: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`spill_margin` is a share of the tokens that a cache holds (`RouterArgs.spill_margin`)."""
        self._margin, self._clock = spill_margin, clock
        self.prefixes = PrefixIndex()
        self._hints = Recent(_MOST_NAMES)
        self._keyed = Recent(_MOST_NAMES)
        self.counts: Counter[str] = Counter()
        """Reason (`REASONS`) -> choices for it."""
        self._turn = 0
        self._new_sessions: deque[tuple[float, str]] = deque()
        """When each new session begins to count no more, and its server."""
        self._expected: Counter[str] = Counter()
        """Server -> new sessions."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Member]) -> Member:
        """Return one of `candidates`, of which there is at least one, and remember the choice."""
        present = [member for member in candidates if not member.is_paused] or candidates
        member, reason = self._chosen(request, present)
        self.counts[reason] += 1
        if (hint := request.hint) is not None:
            self._hints.put(hint, member.url)
        if (key := request.idempotency) is not None:
            self._keyed.put(key, member.url)
        if request.operation.generates:
            self.prefixes.add(request.blocks, member.url)
        elif request.operation.name in _CREATES:
            self._new_sessions.append((self._clock() + _SESSION_SECONDS, member.url))
            self._expected[member.url] += 1
        return member

    def keyed_owner(self, request: RoutedRequest, urls: Sequence[str]) -> str | None:
        """Return the server that answers an Idempotency-Key, or None for a request without one.

        The owner depends on the request only, so a router that was started again finds it, too, unless the request was
        repeated elsewhere before.
        """
        key = request.idempotency
        return None if key is None else self._keyed.get(key) or rendezvous(_lasting(request, key), urls)

    def _chosen(self, request: RoutedRequest, candidates: Sequence[Member]) -> tuple[Member, str]:
        while self._new_sessions and self._new_sessions[0][0] <= self._clock():
            self._expected[self._new_sessions.popleft()[1]] -= 1
        by_url = {member.url: member for member in candidates}
        if (key := request.idempotency) is not None:
            return by_url[rendezvous(_lasting(request, key), list(by_url))], "key"
        self._turn += 1
        turn = self._turn % len(candidates)
        least = min([*candidates[turn:], *candidates[:turn]], key=lambda member: (self._load(member), member.requests))
        if len(candidates) == 1:
            return least, "load"
        hint = request.hint
        at = by_url.get(self._hints.get(hint) or "") if hint is not None else None
        if at is not None:
            is_overloaded = self._is_overloaded(at, least, _CONVERSATION_MARGIN * self._margin)
            return (least, "spilled") if is_overloaded else (at, "conversation")
        blocks = request.blocks if request.operation.generates else []
        known = self.prefixes.known(blocks)
        found = [member for member in candidates if known.get(member.url, 0) >= _LEAST_SHARE * len(blocks) > 0]
        if not found:
            return least, "load"
        continues = self.prefixes.continues(blocks, max(known.values()))
        margin = self._margin if continues else _BEGINNING_MARGIN * self._margin
        free = [member for member in found if not self._is_overloaded(member, least, margin)]
        if not free:
            return least, "spilled"
        return max(free, key=lambda member: (known[member.url], -self._load(member))), "prefix"

    def _is_overloaded(self, member: Member, least: Member, margin: float) -> bool:
        return self._load(member) > max(_SPILL_RATIO * self._load(least), self._load(least) + margin)

    def _load(self, member: Member) -> float:
        return member.load + _SESSION_TOKENS * self._expected[member.url] / member.capacity


def _lasting(request: RoutedRequest, key: bytes) -> bytes:
    """Return what chooses the server of a request with an Idempotency-Key: the name of its conversation, if it has one,
    so that all turns go to one cache, else the key."""
    return key if request.hint is None else request.hint.encode("utf-8", "surrogatepass")


def rendezvous(key: bytes, urls: Sequence[str]) -> str:
    """Return the url with the highest hash together with `key` (Thaler and Ravishankar, 1998): if another url leaves or
    comes, only its own keys move."""
    return max(
        urls, key=lambda url: hashlib.blake2b(url.encode(), digest_size=8, key=hashlib.blake2b(key).digest()).digest()
    )
