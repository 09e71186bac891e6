"""Copies in host memory, by a few threads. `CopyPlan` makes and runs them.

torch's own threads meet at a barrier after each tensor. If other processes (a trainer, other ranks) need the same
cores, the threads wait at the barrier most of the time, and 300 tensors take 5 to 10 times as long as one tensor of the
same bytes. Here each thread takes the next job until no job is left.

A compiled loop copies rows of one dtype, and finds NaN and infinity while it copies. If the whole copy is larger than
the caches, the loop bypasses the caches when it writes, which saves a third of the memory's traffic. torch copies pairs
of two dtypes, and all pairs if there is no compiler. It copies pieces so small that they are still in the cache when
they are checked.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from verl_server.kernels.cpu.library import KernelsUnavailableError, load_library
from verl_server.weight_sync.copying.copy_table import Rows, as_rows
from verl_server.weight_sync.copying.finite import exponent_bits, holds_nonfinite

logger = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]
"""(destination, source)"""
Piece = tuple[int, Tensor, Tensor]
"""(index of the pair, a part of its destination, the same part of its source)"""
Job = Callable[[], Iterable[int]]
"""A function that copies, and returns the indices of the pairs in which it found NaN or infinity."""

_MAX_THREADS = 16
_BYTES_A_THREAD = 2**24
"""The fewest bytes for which one more thread is started. On busy cores a thread may wait a time slice until it runs."""
_ROW_BYTES = 64
"""The least bytes of a row for the compiled loop. torch copies shorter rows faster."""
_PIECE_ELEMENTS = 32_704
"""Elements of a piece. torch copies fewer than 32,768 elements in the calling thread, without waking its own."""
_BATCH_BYTES = 2**19
"""Bytes that torch copies in one call before they are checked. They fit a core's own cache."""
_LAST_CACHE_BYTES = 2**25
"""The size of the last cache if the system does not report it."""


class HostCopies:
    """Copies prepared for `threads` threads, by default as many as torch may use."""

    def __init__(self, pairs: Sequence[Pair], threads: int | None = None) -> None:
        """Source and destination of a pair have equal shapes.

        The caller must keep the tensors alive, because this object keeps only the addresses of some of them.
        """
        nbytes = sum(destination.nbytes for destination, _ in pairs)
        limit = threads or min(torch.get_num_threads(), _MAX_THREADS)
        self._threads = max(1, min(limit, nbytes // _BYTES_A_THREAD))
        share = -(-nbytes // self._threads)
        streamed = nbytes > _last_cache_bytes()
        copy_rows = _compiled_copy()
        blocks: list[tuple[int, _Block]] = []
        pieces: list[Piece] = []
        for i, pair in enumerate(pairs):
            rows = as_rows(*pair)
            if copy_rows is not None and rows is not None and _is_for_kernel(pair, rows):
                parts = self._threads if pair[0].nbytes > share else 1
                blocks += [(i, block) for block in _cut_block(pair, rows, parts)]
            else:
                pieces += [(i, destination, source) for destination, source in _cut_rows(pair, rows)]
        blocks.sort(
            key=lambda block: block[1].nbytes, reverse=True
        )  # the last blocks are small, so that the threads end together
        # The threads of the pool start with the first run and end with this object.
        self._pool = ThreadPoolExecutor(self._threads - 1, "weight-copy") if self._threads > 1 else None
        self._jobs: list[Job] = []
        if copy_rows is not None:
            self._jobs += [partial(_copy_block, copy_rows, *block, streamed) for block in blocks]
        self._jobs += [_piece_job(copy_rows, batch) for batch in _batches(pieces)]
        self._seen: list[int] = []

    def run(self) -> None:
        """Copy, and return when everything is written."""
        jobs, self._seen = deque(self._jobs), []
        helpers = [self._pool.submit(_work, jobs, self._seen) for _ in range(self._threads - 1)] if self._pool else []
        _work(jobs, self._seen)
        for helper in helpers:
            helper.result()

    def nonfinite(self) -> list[int]:
        """Return the indices of the pairs whose destination received NaN or infinity in the last run."""
        return sorted(set(self._seen))


@torch.inference_mode()  # the mode belongs to the thread, and destinations may be inference tensors
def _work(jobs: deque[Job], seen: list[int]) -> None:
    while True:
        try:
            job = jobs.popleft()
        except IndexError:
            return
        seen.extend(job())


# -- rows through the compiled loop --------------------------------------------------------------------------------

CopyRows = Callable[..., bool]
"""`copy_rows` of copy.cpp: (to, from, rows, bytes, to_stride, from_stride, exponents, streamed)."""


class _Block(NamedTuple):
    """Arguments of `copy_rows` except the last."""

    to: int
    start: int
    rows: int
    row_bytes: int
    to_stride: int
    from_stride: int
    exponents: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@functools.cache
def _compiled_copy() -> CopyRows | None:
    """Return the compiled loop, or None if there is no compiler. The first call compiles or loads the library."""
    try:
        copy_rows = load_library().code.copy_rows
    except KernelsUnavailableError as error:
        logger.warning("Weights in host memory are copied by torch alone, several times slower: %s", error)
        return None
    copy_rows.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 4 + [ctypes.c_uint64, ctypes.c_bool]
    copy_rows.restype = ctypes.c_bool
    compiled: CopyRows = copy_rows
    return compiled


@functools.cache
def _last_cache_bytes() -> int:
    """Return the size of the processor's last cache, in bytes."""
    try:
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE")) or _LAST_CACHE_BYTES
    except (OSError, ValueError):
        return _LAST_CACHE_BYTES


def _is_for_kernel(pair: Pair, rows: Rows) -> bool:
    destination, source = pair
    is_aligned = not (destination.data_ptr() | source.data_ptr()) % destination.itemsize
    is_wide = rows.rows == 1 or rows.columns * destination.itemsize >= _ROW_BYTES
    return destination.dtype == source.dtype and is_aligned and is_wide


def _cut_block(pair: Pair, rows: Rows, parts: int) -> Iterator[_Block]:
    """Yield the arguments of `copy_rows` for parts of about equal size: some rows each, or a piece of a single row."""
    destination, source = pair
    itemsize, exponents = destination.itemsize, _exponents(destination.dtype)
    to, start = destination.data_ptr(), source.data_ptr()
    row_bytes, to_stride, from_stride = (n * itemsize for n in rows[1:])
    if rows.rows == 1:
        part = -(-rows.columns // parts) * itemsize
        for skip in range(0, row_bytes, part):
            yield _Block(to + skip, start + skip, 1, min(part, row_bytes - skip), 0, 0, exponents)
        return
    part = -(-rows.rows // parts)
    for first in range(0, rows.rows, part):
        count = min(part, rows.rows - first)
        addresses = to + first * to_stride, start + first * from_stride
        yield _Block(*addresses, count, row_bytes, to_stride, from_stride, exponents)


def _copy_block(copy_rows: CopyRows, pair: int, block: _Block, streamed: bool) -> tuple[int, ...]:
    return (pair,) if copy_rows(*block, streamed) else ()


def _exponents(dtype: torch.dtype) -> int:
    return exponent_bits(dtype, 8).exponents


# -- pieces through torch ------------------------------------------------------------------------------------------


def _cut_rows(pair: Pair, rows: Rows | None) -> list[Pair]:
    """Divide a pair into pieces that torch copies in one thread. A pair that is not two-dimensional is one piece."""
    if rows is None:
        return [pair]
    shape = (rows.rows, rows.columns)
    destination = pair[0].as_strided(shape, (rows.destination_stride, 1))
    source = pair[1].as_strided(shape, (rows.source_stride, 1))
    dim, size = (1, _PIECE_ELEMENTS) if rows.rows == 1 else (0, max(1, _PIECE_ELEMENTS // rows.columns))
    return list(zip(destination.split(size, dim), source.split(size, dim), strict=True))  # type: ignore[no-untyped-call]


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces, each large enough for one call."""
    batch: list[Piece] = []
    nbytes = 0
    for i, piece in enumerate(pieces):
        batch.append(piece)
        nbytes += piece[1].nbytes
        if nbytes >= _BATCH_BYTES or i == len(pieces) - 1:
            yield batch
            batch, nbytes = [], 0


def _piece_job(copy_rows: CopyRows | None, batch: list[Piece]) -> Job:
    """Return a job that copies a batch and checks the destinations, because a conversion may overflow."""
    looks: list[tuple[int, Callable[[], bool]]] = []
    spans: list[tuple[int, int, int, int]] = []
    """(index of the pair, address, bytes, exponents) of the memory that the compiled loop can check.

    Adjacent pieces of memory are merged.
    """
    for i, destination, _ in batch:
        if copy_rows is None or not destination.is_contiguous():
            looks.append((i, partial(holds_nonfinite, destination)))
            continue
        start, nbytes = destination.data_ptr(), destination.nbytes
        if spans and spans[-1][0] == i and spans[-1][1] + spans[-1][2] == start:
            start, nbytes = spans[-1][1], spans.pop()[2] + nbytes
        spans.append((i, start, nbytes, _exponents(destination.dtype)))
    if copy_rows is not None:
        looks += [(i, partial(copy_rows, None, at, 1, nbytes, 0, 0, bits, False)) for i, at, nbytes, bits in spans]
    return partial(
        _copy_pieces,
        tuple(destination for _, destination, _ in batch),
        tuple(source for _, _, source in batch),
        looks,
    )


def _copy_pieces(
    destinations: tuple[Tensor, ...], sources: tuple[Tensor, ...], looks: list[tuple[int, Callable[[], bool]]]
) -> list[int]:
    torch._foreach_copy_(destinations, sources)
    return [i for i, is_nonfinite in looks if is_nonfinite()]
