"""`MemoryFile`: the file behind a trainer's shared memory, read with `pread`.

`open_memory` reads a view this way if mapping it is not safe: another process can cut off a file that is not sealed,
and a read of a mapping beyond the end of its file is SIGBUS, the end of the server. `pread` returns fewer bytes
instead. It also reads the holes of a sparse file as zeros, while a read of a mapped hole allocates a page.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.shm_file import read_exactly

_MOST_SPREAD = 16
"""Most bytes of memory that are touched for each byte of a view."""
_MOST_ROWS = 1 << 18
"""Rows that are read one by one for a view, a microsecond each."""


class MemoryFile:
    """An open file that holds an allocation. Closed with the last reference to it."""

    def __init__(self, fd: int, path: str, start: int = 0) -> None:
        """Take over `fd`. `start`: bytes from the start of the file to the allocation."""
        self.fd, self.path, self._start = fd, path, start
        weakref.finalize(self, os.close, fd)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from a byte of the allocation. Raise WeightUpdateError if the file ends before."""
        try:
            read_exactly(self.fd, buffer, self._start + offset, self.path)
        except OSError as error:
            raise WeightUpdateError(f"Cannot read {self.path}: {error.strerror}.") from None


class FileView:
    """A strided view of a file, and a copy of its elements in memory of this process.

    The copy takes at most `_MOST_SPREAD` times the bytes of the elements, whatever their strides.
    """

    def __init__(
        self, file: MemoryFile, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> None:
        """`stride` and `offset` count elements; the view is not empty. Raise WeightUpdateError for too many rows."""
        self._file = file
        self.is_scattered = is_scattered(shape, stride, dtype.itemsize)
        if is_spread(shape, stride):
            starts, row, stride = _rows(shape, stride)
        else:
            starts, row = [0], elements_spanned(shape, stride)
        self._offsets = [(offset + start) * dtype.itemsize for start in starts]
        self._row_bytes = row * dtype.itemsize
        self._memory = torch.empty(len(starts) * self._row_bytes, dtype=torch.uint8)
        self.data = self._memory.view(dtype).as_strided(tuple(shape), tuple(stride))
        """The view, in memory of this process. Undefined before `read`."""

    def read(self) -> None:
        """Copy the elements as they are now. Raise WeightUpdateError if the file was cut off."""
        memory, size = self._memory.numpy().data, self._row_bytes
        for i, offset in enumerate(self._offsets):
            self._file.read(memory[i * size : (i + 1) * size], offset)


def elements_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements of the memory from the first to the last element of a view that is not empty."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def is_spread(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if there is far more memory between the elements of a view than in them."""
    return elements_spanned(shape, stride) > _MOST_SPREAD * math.prod(shape)


def is_scattered(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
    """Return True if a view's pages are far more memory than its elements, because its rows are short."""
    if not is_spread(shape, stride):
        return False
    row = math.prod(shape[_row_dim(shape, stride) :]) * itemsize
    return row + 2 * mmap.PAGESIZE > _MOST_SPREAD * row


def _row_dim(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the first of the last dimensions whose elements lie one behind the other."""
    dim, size = len(shape), 1
    while dim and (stride[dim - 1] == size or shape[dim - 1] == 1):
        dim -= 1
        size *= shape[dim]
    return dim


def _rows(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], int, list[int]]:
    """(start of each row, elements of a row, strides of the rows one behind the other), all in elements."""
    split = _row_dim(shape, stride)
    count = math.prod(shape[:split])
    if count > _MOST_ROWS:
        raise WeightUpdateError(
            f"its {math.prod(shape):,} elements lie scattered over {elements_spanned(shape, stride):,} elements of "
            f"memory, in {count:,} rows; at most {_MOST_ROWS:,} are read. Make the tensor contiguous."
        )
    starts = [0]
    for n, step in zip(shape[:split], stride[:split], strict=True):
        starts = [start + i * step for start in starts for i in range(n)]
    return starts, math.prod(shape[split:]), [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
