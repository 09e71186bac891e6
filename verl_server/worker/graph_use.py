"""`GraphUse`: counts the steps that a CUDA graph computed, and those that should have had one.

Owned by `StepGraphs`. Steps without a graph take several times as long with a small model, so the log names the number,
the reason and a remedy: at the first such step, and whenever there are ten times as many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class GraphUse:
    def __init__(self, rank: int, reason: Callable[[], str]) -> None:
        """`reason` returns sentences that say why a step has no graph, with a remedy. Rank 0 logs them."""
        self._rank, self._reason = rank, reason
        self.num_with = self.num_without = 0
        self._next_warning = 1

    def count(self, tokens: int, *, decodes: bool, has_graph: bool) -> None:
        """Count a step of a size that is captured."""
        if has_graph:
            self.num_with += 1
            return
        self.num_without += 1
        if self.num_without < self._next_warning or self._rank > 0:
            return
        self._next_warning *= 10
        kind = "requests that decode" if decodes else "tokens"
        logger.warning(
            "%d of %d steps so far were launched operator by operator, though steps of their size should run as CUDA "
            "graphs. The latest had %d %s. %s",
            *(self.num_without, self.num_with + self.num_without, tokens, kind, self._reason()),
        )
