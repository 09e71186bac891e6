"""Copies of index arrays to the device: many small arrays in one transfer.

A transfer costs as much as a small kernel, so all arrays of a step are copied together, through pinned memory. torch's
host allocator does not reuse that memory before the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

_ALIGNMENT = 4
"""Arrays start at multiples of this many int32s: Triton compiles another kernel for pointers that are not aligned to
16 bytes."""


class PackedInts:
    """Several int32 arrays, each with a fixed capacity, in one device buffer that never moves."""

    def __init__(self, capacities: Sequence[int], device: torch.device) -> None:
        self._starts, total = _layout(capacities)
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self.views = [self._buffer[start : start + n] for start, n in zip(self._starts, capacities, strict=True)]

    def write(self, arrays: Sequence[npt.NDArray[np.integer]]) -> None:
        """Copy `arrays` to the start of each view, in the order of the current stream, without waiting."""
        staging = torch.empty(len(self._buffer), dtype=torch.int32, pin_memory=self._buffer.is_cuda)
        _fill(staging, self._starts, arrays)
        self._buffer.copy_(staging, non_blocking=True)


def upload(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Copy each array to an int32 tensor on the device, in one transfer, without waiting for it."""
    starts, total = _layout([len(array) for array in arrays])
    staging = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    _fill(staging, starts, arrays)
    buffer = staging.to(device, non_blocking=True)
    return [buffer[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]


def token_positions(cached: Ints, extend: Ints) -> Ints:
    """[tokens] position of every new token in its sequence, for entries with `cached` and `extend` tokens each."""
    offsets = np.cumsum(extend) - extend
    return np.arange(int(extend.sum())) - np.repeat(offsets - cached, extend)


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy the array to `device`, with its dtype and without waiting. On the CPU both share their memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, total


def _fill(staging: Tensor, starts: Sequence[int], arrays: Sequence[npt.NDArray[np.integer]]) -> None:
    host = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + len(array)] = array
