"""Codes: values that identify the origin of each element of a checkpoint, for the proof of a `LoadTrace`.

The code of an element is a hash of its tensor's number and its position. For a dtype of two bytes, two rounds have 30
bits of hash together. Each code is a finite number with a magnitude below 2. So a conversion to another floating dtype
changes a code in the same way as a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 2
_CHUNK = 1 << 24
"""Number of elements whose hashes are in memory at one time."""
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""The odd constants of the splitmix64 generator (Steele et al. 2014), as signed integers."""


def coded(number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, round_: int) -> Tensor:
    """Return the codes of tensor `number` in a round, as a contiguous tensor of `shape` and floating `dtype`."""
    full = torch.empty(shape, dtype=dtype, device=device)
    flat = full.view(-1)
    bits = flat.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        hashed = _hash(torch.arange(start, stop, dtype=torch.int64, device=device), number)
        bits[start:stop] = _finite(hashed >> (16 * round_), dtype.itemsize).to(bits.dtype)
    return full


def _hash(index: Tensor, number: int) -> Tensor:
    x = index + (number << 36)
    for shift, multiplier in zip((30, 27, 31), _MULTIPLIERS, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _finite(x: Tensor, itemsize: int) -> Tensor:
    """Return the low 8 * `itemsize` bits of each hash as a signed integer. The highest bit of the exponent is 0."""
    width = 8 * itemsize
    magnitude = x & ((1 << (width - 2)) - 1)
    return torch.where((x >> (width - 1)) & 1 == 1, magnitude - (1 << (width - 1)), magnitude)
