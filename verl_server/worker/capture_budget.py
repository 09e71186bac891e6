"""`CaptureBudget`: counts the seconds that captures of CUDA graphs took, and compares them with a limit.

`StepGraphs` owns it. Beyond the limit, `StepGraphs` captures only sizes to which other sizes may be padded. Ranks
measure different times, but must capture the same graphs. So the ranks exchange their times with the vote on each
capture, and every rank counts the longest time.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from typing import NamedTuple

from verl_server.ipc.tp_group import TpGroup

logger = logging.getLogger(__name__)

MOST_SECONDS = 30.0
"""The most seconds for all captures. With 1,024 requests, 145 graphs of some 40 ms take 6 s on one H200.

If captures take five times as long, they delay steps for longer than smaller paddings save.
"""
_OUTCOME = struct.Struct("<?dqq")
"""Layout of an `Outcome`, a rank's message after a capture."""


class Outcome(NamedTuple):
    """The outcome of a capture on one rank."""

    ok: bool
    """True if the capture succeeded."""
    seconds: float
    graphs: int
    """Number of graphs that the rank holds."""
    free: int
    """Free bytes of its device."""


class CaptureBudget:
    def __init__(self) -> None:
        self.total_seconds = 0.0
        """Seconds of all captures since the start, the same number on all ranks."""
        self.latest: list[Outcome] = []
        """The outcomes of the latest capture, by rank."""
        self._spent = 0.0
        """Seconds of the captures since the last `restart`."""
        self._has_warned = False

    @property
    def is_spent(self) -> bool:
        """True if captures took more than `MOST_SECONDS`. All ranks return the same."""
        return self._spent > MOST_SECONDS

    def restart(self) -> None:
        """Count from zero. Called when all graphs were released, because they will be captured again."""
        self._spent = 0.0

    def all_captured(self, tp: TpGroup, outcome: Outcome) -> bool:
        """Return True if the capture succeeded on every rank of `tp`, and count the seconds of the slowest one.

        All ranks call it after each capture.
        """
        self.latest = [Outcome(*_OUTCOME.unpack(data)) for data in tp.gather(_OUTCOME.pack(*outcome))]
        longest = max(outcome.seconds for outcome in self.latest)
        self.total_seconds += longest
        self._spent += longest
        return all(outcome.ok for outcome in self.latest)

    def warn(self, captured: int, omitted: Mapping[str, int]) -> None:
        """Log once which steps get more padding. `captured` is the number of graphs so far.

        `omitted` maps a kind of step to the number of its sizes that will not be captured. If `omitted` is empty,
        nothing is logged.
        """
        if not omitted or self._has_warned:
            return
        self._has_warned = True
        sizes = " and ".join(f"{number} sizes of {kind} steps" for kind, number in omitted.items())
        logger.warning(
            "The captures of %d CUDA graphs took %.1f s, more than their budget of %.0f s. So %s are not captured. "
            "Such steps are padded to a larger graph, by at most a quarter of their tokens or 16 tokens, and take "
            "longer for that. With a smaller cuda_graph_max_bs there are fewer sizes to capture.",
            *(captured, self._spent, MOST_SECONDS, sizes),
        )
