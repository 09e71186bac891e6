"""`LogprobGap`: how far the log-probabilities that a server recorded are from those that a trainer computes again.

For any trainer. Both sides must hold the same weights, and the tokens must be drawn from the distribution that the
trainer computes. Then the gap is the arithmetic of two implementations only, a small number that depends on the dtype.
A larger gap means that the trainer trains another policy than the one that is sampled. `GapAlarm` watches it in a
trainer of your own (runs of this package have `train.run_advisor`):

    alarm = GapAlarm(torch.bfloat16)
    gap = LogprobGap.of(recorded, recomputed, mask)     # each step, before the first update
    alarm.check(gap, step)                              # warns, or raises LogprobGapError

Ranks add their gaps (`sums`, `from_sums`), so that all of them decide alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_server.errors import VerlServerError
from verl_server.gap_bounds import CAUSES, DTYPE_BOUNDS, GROWING_STEPS, GapHistory
from verl_server.gap_bounds import GapBounds as GapBounds

logger = logging.getLogger(__name__)


class LogprobGapError(VerlServerError):
    """Server and trainer disagree about log-probabilities by more than arithmetic explains."""

    exit_status = 4


@dataclass(frozen=True)
class LogprobGap:
    """Differences of recorded and recomputed log-probabilities over some tokens, in nats."""

    tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float
    """Largest absolute difference."""
    kl: float
    """Estimate of KL(recorded || recomputed) per token: the mean of r - 1 - log r, r = exp(recomputed - recorded)."""

    @classmethod
    def of(cls, recorded: Tensor, recomputed: Tensor, mask: Tensor | None = None) -> LogprobGap | None:
        """Return the gap of two tensors [n], or None if no token is left.

        `mask` [n] bool selects the tokens to compare: leave out tokens that were not drawn from the distribution that
        the trainer computes (forced, edited, sampled under other weights).
        """
        difference = (recomputed.detach() - recorded.detach()).double().cpu()
        if mask is not None:
            difference = difference[mask.cpu()]
        if not len(difference):
            return None
        difference = difference.nan_to_num(nan=math.inf)
        k3 = (difference.exp() - 1 - difference).nan_to_num(nan=math.inf)
        size = difference.abs()
        return cls(len(difference), float(size.mean()), float(size.max()), float(k3.mean()))

    @staticmethod
    def sums(gap: LogprobGap | None) -> tuple[list[float], float]:
        """Return ([tokens, summed difference, summed KL], largest difference).

        Over ranks, add the elements of the list, and take the maximum of the largest difference.
        """
        if gap is None:
            return [0.0, 0.0, 0.0], 0.0
        return [float(gap.tokens), gap.mean * gap.tokens, gap.kl * gap.tokens], gap.largest

    @classmethod
    def from_sums(cls, sums: list[float], largest: float) -> LogprobGap | None:
        """Return the gap of all ranks; None if no rank had a token."""
        tokens = int(sums[0])
        return cls(tokens, sums[1] / tokens, largest, sums[2] / tokens) if tokens else None

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, largest {self.largest:.2g}, KL {self.kl:.2g} nats over {self.tokens:,} tokens"


BOUNDS: dict[torch.dtype, GapBounds] = {getattr(torch, name): bounds for name, bounds in DTYPE_BOUNDS.items()}
"""Bounds by the dtype in which both sides compute."""


class GapAlarm:
    """Judges the gap of each step of a run."""

    def __init__(self, dtype: torch.dtype, *, bounds: GapBounds | None = None, stops: bool = True) -> None:
        """`dtype`: the dtype of the passes of both sides. `bounds` replace the bounds of the dtype. `stops`: True if
        a gap may end the run."""
        self.bounds = bounds or BOUNDS[dtype]
        self._dtype, self._stops = str(dtype).removeprefix("torch."), stops
        self._history = GapHistory(self.bounds)
        self.on_alarm: Callable[[int, str, bool], None] = lambda step, text, stops: None
        """Takes the step of an alarm, its text, and True if it raises an error."""

    def check(self, gap: LogprobGap | None, step: int) -> None:
        """Warn if the gap of `step` is above its bound. Raise LogprobGapError far above it, or if it keeps growing."""
        if gap is None or (verdict := self._history.judge(gap.mean, gap.largest)) is None:
            return
        expected = self._history.expected(self._dtype)
        text = f"Step {step}: log-probabilities of server and trainer differ: {gap}; {expected}."
        if verdict.grows and self._stops:
            text += f" It grew over {GROWING_STEPS} steps."
        message = f"{text} Likely causes: {CAUSES}."
        is_end = self._stops and verdict.is_error
        self.on_alarm(step, message, is_end)
        if is_end:
            raise LogprobGapError(message)
        logger.warning("%s", message)
