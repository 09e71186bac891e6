"""`GraphUse`: counts the steps that a CUDA graph computed, and the steps that should have had a graph.

`StepGraphs` owns it. With a small model, a step without a graph takes several times as long. So the log has the number
of such steps, the reason and a remedy: at the first such step, and whenever the number has grown tenfold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class GraphUse:
    def __init__(self, rank: int, reason: Callable[[], str]) -> None:
        """`reason` returns the reason why a step has no graph, and a remedy, as sentences.

        Rank 0 logs these sentences.
        """
        self._rank, self._reason = rank, reason
        self.num_with = self.num_without = 0
        self._next_warning = 1

    def count(self, tokens: int, *, decodes: bool, has_graph: bool) -> None:
        """Count a step whose size is one of the captured sizes."""
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
