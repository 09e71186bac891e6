"""When to give up: `SkippedSteps` counts the steps in a row that had nothing to train on.

The training loop calls `note` after each step. All ranks see the same metrics, so all of them decide alike.
"""

from __future__ import annotations

import logging
import time

from verl_server.errors import VerlServerError
from verl_server.train.metrics import StepMetrics

logger = logging.getLogger(__name__)


class NothingToTrainError(VerlServerError):
    """Too many steps in a row had nothing to train on; the message names the cause."""


class SkippedSteps:
    def __init__(self, most: int, pause: float) -> None:
        """Raise at the `most`-th skipped step in a row. After a step with failed episodes wait `pause` seconds, and
        twice as long after each further one."""
        self._most = most
        self._pause = pause
        self._in_a_row = 0

    def note(self, metrics: StepMetrics) -> None:
        """Take a step into account: waits, or raises `NothingToTrainError`."""
        if metrics.skipped is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            raise NothingToTrainError(
                f"Gave up: {self._in_a_row} step(s) in a row had nothing to train on. "
                f"Step {metrics.step}: {metrics.skipped}."
            )
        pause = self._pause * 2 ** (self._in_a_row - 1) if metrics.failed else 0.0
        logger.warning(
            "Step %d is skipped (%d of %d in a row): %s. The next step begins in %.3g s.",
            metrics.step,
            self._in_a_row,
            self._most,
            metrics.skipped,
            pause,
        )
        time.sleep(pause)
