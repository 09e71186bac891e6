"""`SkippedSteps`: end a run after several steps in a row with nothing to train on.

The training loop calls `note` after each step. All ranks have the same metrics, so all of them decide alike.
"""

from __future__ import annotations

import logging
import time

from verl_server.errors import VerlServerError
from verl_server.train.metrics import StepMetrics

logger = logging.getLogger(__name__)


class NothingToTrainError(VerlServerError):
    """Raised after too many steps in a row with nothing to train on. The message names the cause."""

    exit_status = 3


class SkippedSteps:
    def __init__(self, most: int, pause: float) -> None:
        """`most` skipped steps in a row end the run. `pause` is the time to wait after a skipped step with failed
        episodes, in seconds; it doubles with each further skipped step in a row."""
        self._most = most
        self._pause = pause
        self._in_a_row = 0

    def note(self, metrics: StepMetrics) -> None:
        """Count a skipped step, then wait or raise NothingToTrainError. Any other step resets the count."""
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
