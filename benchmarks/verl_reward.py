"""A reward function for verl's trainer. `verl_run` names this file in `reward.custom_reward_function.path`.

The module imports nothing of this package: verl loads it by its path.
"""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **extra: Any) -> float:
    """Return the share of bytes in the answer that are below 128, plus a little that depends on all of them.

    A policy can learn the share, and two answers to one prompt hardly ever have the same reward, so that every step of
    GRPO has a gradient.
    """
    data = solution_str.encode()
    share = sum(byte < 128 for byte in data) / max(1, len(data))
    return share + zlib.crc32(data) / 2**32 / 100
