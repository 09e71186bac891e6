"""Copies in host memory, by a few threads. Made and run by `CopyPlan`.

torch's own threads meet at a barrier after each tensor. Where other processes want the same cores (a trainer, other
ranks) they wait there for one another most of the time, and 300 tensors take 5 to 10 times as long as one. Here each
thread takes the next job until none is left.

Blocks of one dtype go through memmove: for blocks beyond a share of the last cache (glibc decides) it writes past
the caches and so saves a third of the memory's traffic, which torch's copies never do.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from verl_server.weight_sync.copying.copy_table import Rows, as_rows

Pair = tuple[Tensor, Tensor]
"""(destination, source)"""

_MAX_THREADS = 16
_BYTES_A_THREAD = 2**24
"""Less is not worth waking a thread for: on busy cores it may take a time slice until it runs."""
_MOVE_BYTES = 2**18
_PIECE_ELEMENTS = 32_704
"""torch copies fewer than 32,768 elements in the calling thread, without waking its own."""
_BATCH_BYTES = 2**21


class HostCopies:
    """Copies prepared for `threads` threads, by default as many as torch may use."""

    def __init__(self, pairs: Sequence[Pair], threads: int | None = None) -> None:
        """`pairs` have equal shapes and must outlive this object: some of them are kept as addresses only."""
        nbytes = sum(destination.nbytes for destination, _ in pairs)
        limit = threads or min(torch.get_num_threads(), _MAX_THREADS)
        self._threads = max(1, min(limit, nbytes // _BYTES_A_THREAD))
        share = -(-nbytes // self._threads)
        moves: list[tuple[int, int, int]] = []
        pieces: list[Pair] = []
        for pair in pairs:
            rows = as_rows(*pair)
            if _is_block(pair, rows) and pair[0].nbytes >= _MOVE_BYTES:
                moves += _cut_block(pair, self._threads if pair[0].nbytes > share else 1)
            else:
                pieces += _cut_rows(pair, rows)
        moves.sort(key=lambda move: move[2], reverse=True)  # the last jobs are small, so the threads end together
        # Its threads start with the first run and end with this object.
        self._pool = ThreadPoolExecutor(self._threads - 1, "weight-copy") if self._threads > 1 else None
        self._jobs: list[Callable[[], object]] = [partial(ctypes.memmove, *move) for move in moves]
        self._jobs += [partial(torch._foreach_copy_, *batch) for batch in _batches(pieces)]

    def run(self) -> None:
        """Copy; returns when everything is written."""
        jobs = deque(self._jobs)
        helpers = [self._pool.submit(_work, jobs) for _ in range(self._threads - 1)] if self._pool else []
        _work(jobs)
        for helper in helpers:
            helper.result()


@torch.inference_mode()  # the mode belongs to the thread, and destinations may be inference tensors
def _work(jobs: deque[Callable[[], object]]) -> None:
    while True:
        try:
            job = jobs.popleft()
        except IndexError:
            return
        job()


def _is_block(pair: Pair, rows: Rows | None) -> bool:
    destination, source = pair
    return rows is not None and rows.rows == 1 and destination.dtype == source.dtype


def _cut_block(pair: Pair, parts: int) -> Iterator[tuple[int, int, int]]:
    """memmove's arguments for equal parts of a block."""
    destination, source = pair
    part = -(-destination.nbytes // parts)
    for start in range(0, destination.nbytes, part):
        yield destination.data_ptr() + start, source.data_ptr() + start, min(part, destination.nbytes - start)


def _cut_rows(pair: Pair, rows: Rows | None) -> list[Pair]:
    """Pieces small enough that torch copies them in one thread; a pair that is not two-dimensional stays whole."""
    if rows is None:
        return [pair]
    shape = (rows.rows, rows.columns)
    destination = pair[0].as_strided(shape, (rows.destination_stride, 1))
    source = pair[1].as_strided(shape, (rows.source_stride, 1))
    dim, size = (1, _PIECE_ELEMENTS) if rows.rows == 1 else (0, max(1, _PIECE_ELEMENTS // rows.columns))
    return list(zip(destination.split(size, dim), source.split(size, dim), strict=True))  # type: ignore[no-untyped-call]


def _batches(pieces: list[Pair]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Lists of destinations and sources, each worth a call."""
    batch: list[Pair] = []
    nbytes = 0
    for i, piece in enumerate(pieces):
        batch.append(piece)
        nbytes += piece[0].nbytes
        if nbytes >= _BATCH_BYTES or i == len(pieces) - 1:
            yield [destination for destination, _ in batch], [source for _, source in batch]
            batch, nbytes = [], 0
