"""Token ids and log-probabilities as packed arrays: `bytes` of little-endian int32 and float32.

Between the sampler and the caller's result, log-probabilities stay packed. Lists would be millions of objects, and each
full garbage collection visits them all. Packing is exact: the model computes log-probabilities in float32.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ITEM = 4
"""Bytes of one id or log-probability."""


def pack_ids(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)  # several times faster than NumPy's conversion of a list


def pack_logprobs(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def pack_array(values: npt.NDArray[np.generic]) -> bytes:
    """Pack an array of any shape: integers as ids, floats as log-probabilities."""
    return values.astype("<f4" if values.dtype.kind == "f" else "<i4", copy=False).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return ids


def unpack_logprobs(packed: bytes) -> list[float]:
    logprobs: list[float] = np.frombuffer(packed, dtype="<f4").tolist()
    return logprobs
