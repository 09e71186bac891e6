"""`Window`: consecutive tensors of one update over a process group, and the place of each tensor in a buffer.

`process_group` receives one window after the other. `windows_of` divides an update that a request describes into
windows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_server.errors import BadRequestError

_ALIGNMENT = 256
"""Alignment of tensors in a window, in bytes. It suits every dtype."""


class Window:
    """Consecutive tensors of one update, and the place of each tensor in a buffer."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.nbytes = 0
        self._items: list[tuple[torch.dtype, list[int], int, int]] = []
        self._parts: list[tuple[int, int]] = []

    def add(self, bucket: Bucket) -> None:
        """Append the tensors of one broadcast, without gaps between them."""
        start = end = _aligned(self.nbytes)
        for name, dtype, shape in bucket:
            nbytes = math.prod(shape) * dtype.itemsize
            self.names.append(name)
            self._items.append((dtype, shape, end, nbytes))
            end += nbytes
        self._parts.append((start, end - start))
        self.nbytes = end

    def parts(self) -> list[tuple[int, int]]:
        """Return (start, bytes) of each broadcast in the buffer, in the order of the broadcasts."""
        return self._parts

    def tensors(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Return the tensors as views into `buffer`. A tensor that is not aligned for its dtype is a copy."""
        result = []
        for name, (dtype, shape, start, nbytes) in zip(self.names, self._items, strict=True):
            data = buffer[start : start + nbytes]
            result.append((name, (data.clone() if start % dtype.itemsize else data).view(dtype).view(shape)))
        return result


Bucket = list[tuple[str, torch.dtype, list[int]]]
"""(name, dtype, shape) of the tensors of one broadcast."""


def windows_of(
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    load_format: str | None,
    window_bytes: int,
    bucket_bytes: int,
) -> list[Window]:
    """Divide an update into windows of whole broadcasts. Raise BadRequestError if its lists do not describe tensors."""
    everything, windows = Window(), [Window()]
    for bucket in _buckets(names, dtypes, shapes, load_format, bucket_bytes):
        everything.add(bucket)
        if windows[-1].names and _aligned(windows[-1].nbytes) + _nbytes(bucket) > window_bytes // 2:
            windows.append(Window())
        windows[-1].add(bucket)
    return [everything] if everything.nbytes <= window_bytes else windows


def _buckets(
    names: list[str], dtypes: list[str], shapes: list[list[int]], load_format: str | None, bucket_bytes: int
) -> list[Bucket]:
    """Return the tensors of each broadcast of an update."""
    if load_format not in (None, "auto", "flattened_bucket", "packed"):
        raise BadRequestError(
            f"load_format={load_format!r} is not supported; unset it or use 'flattened_bucket' or 'packed'."
        )
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise BadRequestError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: there must be as many of each."
        )
    buckets: list[Bucket] = [[]]
    filled = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape) or math.prod(shape) >= 2**48:
            raise BadRequestError(f"'{name[:100]}': dtype '{dtype_name[:50]}' and shape {shape[:16]} are no tensor's.")
        is_full = load_format != "flattened_bucket" and (load_format != "packed" or filled > bucket_bytes)
        if buckets[-1] and is_full:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, dtype, shape))
        filled += math.prod(shape) * dtype.itemsize
    return buckets


def _nbytes(bucket: Bucket) -> int:
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in bucket)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
