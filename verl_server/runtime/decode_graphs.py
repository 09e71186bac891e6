"""`DecodeGraphs`: decode steps captured as CUDA graphs, one for each batch size, padded up to the next.

Owned by the `ModelRunner`. A decode step of hundreds of small kernels is bound by their launches; replayed as one
graph it is bound by the device. What changes from step to step is in one buffer at a fixed address, written by one
copy before the replay. Sizes are captured when they are first needed, which takes some ten milliseconds each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.models.attention import Ints
from verl_server.models.paged_attention import DecodePart, PagedBackend, PagedStep
from verl_server.runtime.device_arrays import PackedInts
from verl_server.runtime.kv_cache import KVCache, Placement

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, PagedStep], Tensor]
"""(ids, rows, step): logits [n, vocab_size] of a step that only decodes."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """What the graph writes: good until the next replay of any graph, for they share their memory."""


class DecodeGraphs:
    def __init__(self, forward: Forward, kv: KVCache, backend: PagedBackend, max_bs: int) -> None:
        self._forward, self._kv, self._backend = forward, kv, backend
        self._max_bs = min(max_bs, kv.max_rows)
        self._sizes = _batch_sizes(self._max_bs)
        work = len(backend.work(np.ones(1, dtype=np.int64)))
        # ids, positions, slots, rows, lengths, and how the attention kernel's programs share the work
        self._inputs = PackedInts([self._max_bs] * 5 + [work], kv.device)
        self._captured: dict[int, _Captured] = {}
        self._present = True
        self._pool: Any = None
        """The memory that all graphs share, once there is one."""

    def takes(self, placement: Placement) -> bool:
        """Whether `run` can do this step."""
        return self._present and placement.num_decodes == len(placement.rows) <= self._max_bs

    def run(self, placement: Placement) -> Tensor:
        """Logits [entries, vocab_size] of a step that `takes` accepted, good until the next step."""
        n = len(placement.rows)
        size = next(size for size in self._sizes if size >= n)
        self._inputs.write(self._padded(placement, size))
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.logits[:n]

    def release(self) -> None:
        """Give back the graphs and their memory, after all work on them is done; until `resume` none is taken."""
        self._captured.clear()
        self._pool, self._present = None, False

    def resume(self) -> None:
        """Graphs are captured again when they are needed."""
        self._present = True

    def _padded(self, placement: Placement, size: int) -> list[npt.NDArray[np.integer]]:
        """Padding entries write into the padding page; attention leaves them out, so what they compute is undefined."""
        kv = self._kv
        lens = placement.cached + 1
        return [
            _pad(placement.ids, size, 0),
            _pad(placement.positions, size, 0),
            _pad(placement.slots, size, kv.num_pages * kv.page_size),
            _pad(placement.rows, size, kv.max_rows),
            _pad(lens, size, 1),
            self._backend.work(lens),
        ]

    def _step(self, size: int) -> Tensor:
        ids, positions, slots, rows, lens, work = self._inputs.views
        part = DecodePart(rows[:size], lens[:size], work)
        step = PagedStep(self._backend, positions[:size], slots[:size], part, None)
        return self._forward(ids[:size], rows[:size], step)

    def _capture(self, size: int) -> _Captured:
        start = time.perf_counter()
        self._step(size)  # compiles kernels and takes workspaces, neither of which can be captured
        graph = torch.cuda.CUDAGraph()
        # Another thread may be opening a trainer's memory meanwhile: its calls are none of the capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(size)
        self._pool = self._pool or graph.pool()
        logger.debug("Captured decode of %d in %.0f ms", size, 1e3 * (time.perf_counter() - start))
        return _Captured(graph, logits)


def _batch_sizes(max_bs: int) -> list[int]:
    """Few where padding is cheap: a product of 17 rows costs what one of 32 does."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_bs, 16)]
    return [size for size in sizes if size < max_bs] + [max_bs]


def _pad(values: Ints, size: int, value: int) -> Ints:
    return values if len(values) == size else np.concatenate([values, np.full(size - len(values), value)])
