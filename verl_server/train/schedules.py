"""The learning rate of each step, as a pure function of the step: a resumed run has the rates of the whole run.

`PolicyTrainer` sets the result before the first optimizer step of each training step.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["linear", "cosine", "constant"]


def learning_rate(
    step: int, steps: int, *, peak: float, schedule: Schedule = "linear", final: float = 0.0, warmup_steps: int = 0
) -> float:
    """Return the learning rate of `step`, which counts from 0, in a run of `steps` steps.

    With p = step / steps, the rate is `peak` times

        linear      max(final, 1 - p)
        cosine      final + (1 - final) (1 + cos(pi p)) / 2     Loshchilov & Hutter 2017, arXiv 1608.03983
        constant    1

    `final` is the share of `peak` below which the rate does not fall. In the first `warmup_steps` steps, the rate is
    also multiplied by (step + 1) / warmup_steps.
    """
    progress = step / max(1, steps)
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    match schedule:
        case "linear":
            share = max(final, 1.0 - progress)
        case "cosine":
            share = final + (1.0 - final) * (1.0 + math.cos(math.pi * min(1.0, progress))) / 2
        case "constant":
            share = 1.0
    return peak * warmup * share
