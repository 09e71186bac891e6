"""`GapBounds` and `GapHistory`: which gap of log-probabilities between server and trainer is too large.

`logprob_gap.GapAlarm` judges with them in trainers of any kind, and `watch.advisories` in runs and in their files.
Nothing here imports torch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GROWING_STEPS = 4
"""Steps in a row, each with a larger mean gap than the one before, that are an error if the gap is above `warn`."""


@dataclass(frozen=True)
class GapBounds:
    """Bounds on the mean and on the largest gap of a step."""

    warn_mean: float
    warn_largest: float
    stop_mean: float


DTYPE_BOUNDS: Mapping[str, GapBounds] = MappingProxyType(
    {
        "float32": GapBounds(warn_mean=5e-5, warn_largest=1e-4, stop_mean=1e-2),
        "float16": GapBounds(warn_mean=2e-2, warn_largest=0.2, stop_mean=0.1),
        "bfloat16": GapBounds(warn_mean=0.1, warn_largest=2.0, stop_mean=0.4),
    }
)
"""Bounds by the dtype in which both sides compute: above all that SmolLM2-135M shows (docs/training.md)."""

CAUSES = (
    "server and trainer compute in different dtypes; the server does not hold the trainer's weights (an update that "
    "failed or was partial, another model); requests were sampled at another temperature, or with masks, bias or "
    "penalties that the trainer does not compute; weights or activations that are not finite"
)


@dataclass(frozen=True)
class GapVerdict:
    """A gap beyond its bound of warnings."""

    is_error: bool
    """True if it is far beyond, or keeps growing."""
    grows: bool
    """True if it is an error because it keeps growing."""


class GapHistory:
    """The gaps of the steps so far."""

    def __init__(self, bounds: GapBounds) -> None:
        self.bounds = bounds
        self._means: deque[float] = deque(maxlen=GROWING_STEPS)

    def judge(self, mean: float, largest: float) -> GapVerdict | None:
        """Take the gap of the next step. Return None if it is within its bounds. A gap that is no number is beyond."""
        self._means.append(mean)
        bounds, means = self.bounds, list(self._means)
        if not self.is_beyond(mean, largest):
            return None
        grows = (
            len(means) == GROWING_STEPS
            and all(a < b for a, b in itertools.pairwise(means))
            and mean > bounds.warn_mean
            and mean >= 2 * means[0]
        )
        is_far = not mean <= bounds.stop_mean
        return GapVerdict(is_far or grows, grows and not is_far)

    def is_beyond(self, mean: float, largest: float, level: float = 1.0) -> bool:
        """Return True if a gap is beyond `level` times a bound of warnings. One that is no number is."""
        return not (mean <= level * self.bounds.warn_mean and largest <= level * self.bounds.warn_largest)

    def expected(self, dtype: str) -> str:
        """Return the bounds of warnings as text."""
        return f"{self.bounds.warn_mean:g} (mean) and {self.bounds.warn_largest:g} (largest) are expected in {dtype}"
