"""`MemoryFile`: the file behind a trainer's shared memory, read with `pread`.

`open_memory` reads a view this way if a mapping of the view would not be safe: another process can cut off a file that
is not sealed, and a read of a mapping beyond the end of its file is SIGBUS, which ends the server. `pread` returns
fewer bytes instead. `pread` also reads the holes of a sparse file as zeros without memory, while a read of a mapped
hole allocates a page.
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
"""The most bytes of memory that are read for each byte of a view."""
_MOST_ROWS = 1 << 18
"""The most rows of a view that are read one by one. Each read takes a microsecond."""


class MemoryFile:
    """An open file that holds an allocation. Closed with the last reference to it."""

    def __init__(self, fd: int, path: str, start: int = 0) -> None:
        """Take ownership of `fd`. `start` is the number of bytes from the start of the file to the allocation."""
        self.fd, self.path, self._start = fd, path, start
        weakref.finalize(self, os.close, fd)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from a byte of the allocation on. Raise WeightUpdateError if the file ends too early."""
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
        """The copy of the view in memory of this process. Its values are undefined before `read`."""

    def read(self) -> None:
        """Copy the present values of the elements. Raise WeightUpdateError if the file was cut off."""
        memory, size = self._memory.numpy().data, self._row_bytes
        for i, offset in enumerate(self._offsets):
            self._file.read(memory[i * size : (i + 1) * size], offset)


def elements_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of memory from the first to the last element of a non-empty view."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def is_spread(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a view spans far more memory than its elements take."""
    return elements_spanned(shape, stride) > _MOST_SPREAD * math.prod(shape)


def is_scattered(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
    """Return True if the pages of a view take far more memory than its elements, because the rows are short."""
    if not is_spread(shape, stride):
        return False
    row = math.prod(shape[_row_dim(shape, stride) :]) * itemsize
    return row + 2 * mmap.PAGESIZE > _MOST_SPREAD * row


def _row_dim(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the first dimension of the contiguous tail of a view: its last dimensions whose elements are adjacent."""
    dim, size = len(shape), 1
    while dim and (stride[dim - 1] == size or shape[dim - 1] == 1):
        dim -= 1
        size *= shape[dim]
    return dim


def _rows(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], int, list[int]]:
    """Return (start of each row in the memory, length of a row, strides of a contiguous copy), all in elements."""
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
