"""`Headroom`: the pages that a new episode must leave free, because the histories of running episodes will grow.

The length of an episode is not known in advance. If too many episodes run, their histories outgrow the pool, and each
episode takes pages that another episode needs in its next turn. Then the headroom rises by the number of pages that
were lost, so that fewer episodes run. The headroom falls slowly, with every turn that ends. TCP finds the rate of a
link in this way (additive increase, multiplicative decrease; Jacobson 1988), and CONCUR (2026) finds the number of
agents of an engine. If no request continues an earlier turn, no page is kept, so no kept page is lost, and the headroom
stays 0.
"""

from __future__ import annotations

_DECAY = 0.999
"""Factor for each turn that ends. In `benchmarks.cache_policies` 0.9995 makes little difference, and 0.99 forgets too
early."""
_MOST = 0.5
"""Largest headroom, as a share of the pool.

With a larger headroom, too few episodes run in a small pool: a step of few requests takes almost as long as a step of
many requests.
"""


class Headroom:
    """The headroom in pages. `Admission` owns it."""

    def __init__(self, num_pages: int) -> None:
        self._most = _MOST * num_pages
        self._pages = 0.0

    @property
    def pages(self) -> int:
        """Number of pages that a request which begins an episode must leave."""
        return int(self._pages)

    def lost(self, pages: int) -> None:
        """Record that `pages` kept pages were evicted because other episodes needed them."""
        self._pages = min(self._most, self._pages + pages)

    def turn_ended(self) -> None:
        """Record that a turn ended."""
        self._pages *= _DECAY
