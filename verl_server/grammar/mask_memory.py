"""`MaskMemory`: the masks of steps, and the states of their rows, in memory that several processes share.

The `MatcherClient` of a scheduler makes it and reads it, and each `matcher_process` writes its rows. A file in memory
holds a fixed number of buffers. Each buffer has the masks of one step, and then a state for each row. Pages that no
step has used take no memory.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set if token t is allowed."""
States = npt.NDArray[np.uint8]
"""One of the states below for each row."""

PENDING, WRITTEN, FAILED = 0, 1, 2
"""States of a row: its mask is being computed, is written, or could not be computed."""


@dataclass(frozen=True)
class MaskLayout:
    buffers: int
    rows: int
    """The most rows of a step."""
    num_words: int
    """Words of a mask."""

    @property
    def words_bytes(self) -> int:
        """Bytes of the masks of a buffer, in whole pages: a GPU's driver pins pages."""
        return _whole_pages(4 * self.rows * self.num_words)

    @property
    def buffer_bytes(self) -> int:
        return self.words_bytes + _whole_pages(self.rows)


class MaskMemory:
    def __init__(self, layout: MaskLayout, fd: int | None = None) -> None:
        """Map the file `fd`, or a new one. The object takes ownership of the descriptor."""
        size = layout.buffers * layout.buffer_bytes
        if fd is None:
            fd = os.memfd_create("verl-grammar-masks", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.layout, self.fd = layout, fd
        self._map = mmap.mmap(fd, size)

    def words(self, buffer: int) -> Words:
        """Return the masks of a buffer: int32 [rows, words]."""
        layout = self.layout
        start, count = buffer * layout.buffer_bytes, layout.rows * layout.num_words
        return np.frombuffer(self._map, np.int32, count, start).reshape(layout.rows, layout.num_words)

    def states(self, buffer: int) -> States:
        """Return the states of a buffer: uint8 [rows]."""
        start = buffer * self.layout.buffer_bytes + self.layout.words_bytes
        return np.frombuffer(self._map, np.uint8, self.layout.rows, start)

    def __del__(self) -> None:
        os.close(self.fd)  # the memory is freed when no array refers to it any more


def _whole_pages(count: int) -> int:
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
