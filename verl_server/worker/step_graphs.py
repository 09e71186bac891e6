"""`StepGraphs`: steps captured as CUDA graphs, by their kind and size, padded up to the next.

Owned by the `ModelRunner`. A step is hundreds of small kernels: launched one by one, those of a small model or a small
batch keep the device waiting; replayed as one graph they do not. There are steps that only decode, by their entries,
and steps that also prefill, by their tokens; both also with keys that decodes share (cascade attention), which one more
kernel reads. What changes from step to step lies in a buffer at a fixed address, written by one copy before the replay.
Sizes are captured while the engine is idle, or when they are first needed; each takes some ten milliseconds. Where
there are several ranks all capture the same sizes in the same order, and hold a graph only if all of them do: the
collectives in it must meet.
"""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.device_arrays import Ints, PackedInts
from verl_server.kernels.paged_attention import SharedKeys
from verl_server.models.attention import Placement
from verl_server.models.triton_attention import DecodePart, DecodeWork, ExtendPart, PagedBackend, PagedStep
from verl_server.worker.kv_cache import KVCache
from verl_server.worker.step_memory import MOST_GRAPH_TOKENS, StepMemory

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Tensor | None, PagedStep], Tensor]
"""(ids [tokens], rows [decodes], last [sampled] or None for all tokens, step): logits [sampled, vocab_size]."""


class _Key(NamedTuple):
    """Which steps a graph is for."""

    kind: str
    """"decode" or "mixed"."""
    size: int
    shared: bool
    """With the keys that decodes share in a kernel of their own."""

    def __str__(self) -> str:
        return f"{self.kind} step of {self.size}" + (" with shared keys" if self.shared else "")


@dataclass
class _Captured:
    inputs: PackedInts
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """What the graph writes: good until the next replay of any graph, for they share their memory."""


class StepGraphs:
    def __init__(
        self,
        forward: Forward,
        kv: KVCache,
        backend: PagedBackend,
        tp: TpGroup,
        memory: StepMemory,
        max_bs: int,
        kept_free: int,
    ) -> None:
        """`kept_free`: bytes of the device that graphs must leave to steps without a graph."""
        self._memory, self._kept_free = memory, kept_free
        self._forward, self._kv, self._backend, self._tp = forward, kv, backend, tp
        self._max_bs = min(max_bs, kv.max_rows)
        self._decode_sizes = _decode_sizes(self._max_bs)
        self._mixed_sizes = _mixed_sizes()
        self._all = self._in_order()
        self._captured: dict[_Key, _Captured] = {}
        self._pool: Any = None
        """The memory that all graphs share, once there is one."""
        self._present = True
        self._is_full = False
        """The device had no memory for one more graph."""

    def _in_order(self) -> list[_Key]:
        """All sizes: of each kind the largest first, for the memory that it takes is enough for the others."""
        decode = [_Key("decode", size, False) for size in reversed(self._decode_sizes)]
        mixed = [_Key("mixed", size, False) for size in reversed(self._mixed_sizes)]
        if not self._backend.cascade:
            return decode + mixed
        shared = [key._replace(shared=True) for key in decode + mixed if key.size > 1]
        # One with shared keys at once: its kernels take seconds to compile on a machine that never did.
        return decode[:1] + shared[:1] + decode[1:] + mixed + shared[1:]

    def run(self, placement: Placement, sample: list[int]) -> Tensor | None:
        """Logits [len(sample), vocab_size] of a step, good until the next one; None if there is no graph for it."""
        n, tokens = len(placement.rows), len(placement.ids)
        decodes = placement.num_decodes == n
        if not self._present or tokens > (self._max_bs if decodes else MOST_GRAPH_TOKENS):
            return None
        all_sampled = decodes and len(sample) == n
        kind, sizes = ("decode", self._decode_sizes) if all_sampled else ("mixed", self._mixed_sizes)
        last = None if all_sampled else placement.last[sample]
        size = sizes[bisect.bisect_left(sizes, tokens)]
        rows, lens = placement.rows[: placement.num_decodes], placement.cached[: placement.num_decodes] + 1
        for cascade in (True, False):  # without memory for the one graph there may be the other
            work = self._backend.plan_decodes(rows, lens, cascade=cascade)
            captured = self._at_hand(_Key(kind, size, work.shared is not None), placement, work, last)
            if captured is not None or work.shared is None:
                break
        if captured is None:
            return None
        captured.graph.replay()
        return captured.logits[: len(sample)]

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def num_left(self) -> int:
        """Sizes that can still be captured ahead."""
        return len(self._all) - len(self._captured) if self._present and not self._is_full else 0

    def capture_next(self) -> None:
        """Capture one more size, ahead of its first step; nothing to do if `num_left` is 0."""
        if self.num_left:
            key = next(key for key in self._all if key not in self._captured)
            none = np.zeros(0, dtype=np.int64)
            nothing = Placement(none, none, none, none, none, none, num_decodes=0)
            work = self._backend.empty_work(shared=key.shared)
            self._at_hand(key, nothing, work, None if key.kind == "decode" else none)

    def release(self) -> None:
        """Give back the graphs and their memory, after all work on them is done; until `resume` none is taken."""
        self._captured.clear()
        self._pool, self._present, self._is_full = None, False, False

    def resume(self) -> None:
        """Graphs are captured again when they are needed."""
        self._present = True

    def _at_hand(self, key: _Key, placement: Placement, work: DecodeWork, last: Ints | None = None) -> _Captured | None:
        """The graph of such steps with its inputs written; captured now if this is the first of them."""
        arrays = self._arrays(key.size, placement, work, last)
        captured = self._captured.get(key)
        if captured is not None:
            captured.inputs.write(arrays)
            return captured
        if self._is_full:
            return None
        try:
            captured = self._capture(key, arrays)
        except torch.OutOfMemoryError as error:
            self._is_full = True
            logger.warning(
                "No memory to capture a %s as a CUDA graph (%s). Steps of sizes without a graph are "
                "launched operator by operator; a smaller mem_fraction_static leaves room for all.",
                key,
                error,
            )
            return None
        self._captured[key] = captured
        return captured

    def _capture(self, key: _Key, arrays: list[npt.NDArray[np.integer]]) -> _Captured:
        """On all ranks, or torch.OutOfMemoryError on all."""
        room = self._room(key) + self._kept_free
        if not self._tp.all_agree(_free_bytes(self._kv.device) >= room):
            raise torch.OutOfMemoryError(f"less than {room >> 20} MiB are left on this or another rank's device")
        start = time.perf_counter()
        inputs = PackedInts(self._capacities(key), self._kv.device)
        inputs.write(arrays)
        self._run_once(key, inputs)
        captured, failure = None, None
        try:
            captured = self._record(key, inputs)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # which refers to what was allocated
        if not self._tp.all_agree(captured is not None) or captured is None:
            raise failure or torch.OutOfMemoryError("another rank has none")
        logger.debug("Captured a %s in %.0f ms", key, 1e3 * (time.perf_counter() - start))
        return captured

    def _run_once(self, key: _Key, inputs: PackedInts) -> None:
        """Compile kernels and take workspaces, neither of which can be captured."""
        try:
            self._step(key, inputs)
        except torch.OutOfMemoryError as error:
            if self._tp.size == 1:
                raise
            raise RuntimeError(
                f"Rank {self._tp.rank} ran out of memory in a {key} while the other ranks wait for it in their sums, "
                f"so the engine ends: {error} Start it with a smaller mem_fraction_static, and look for other "
                "processes that take memory of this device."
            ) from error

    def _record(self, key: _Key, inputs: PackedInts) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Another thread may be opening a trainer's memory meanwhile: its calls are none of the capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(key, inputs)
        self._pool = self._pool or graph.pool()
        return _Captured(inputs, graph, logits)

    def _room(self, key: _Key) -> int:
        """Bytes that are enough to capture such a step."""
        entries = key.size if key.kind == "decode" else min(key.size, self._kv.max_rows)
        return self._memory.graph(key.size, entries)

    # -- what a graph reads --------------------------------------------------------------------------------------

    def _capacities(self, key: _Key) -> list[int]:
        """Of ids, positions, slots; for mixed steps then the rows, cached lengths and starts of chunks, and the sampled
        tokens; and then decoding rows, their lengths, shares of work, and what they share."""
        size, entries = key.size, min(key.size, self._kv.max_rows)
        decodes = [entries, entries, *self._backend.capacities(entries, shared=key.shared)]
        chunks = [] if key.kind == "decode" else [entries, entries, entries + 1, entries]
        return [size, size, size, *chunks, *decodes]

    def _arrays(
        self, size: int, placement: Placement, work: DecodeWork, last: Ints | None
    ) -> list[npt.NDArray[np.integer]]:
        """Padding tokens write into the padding page; attention leaves them out, so what they compute is undefined."""
        kv, n = self._kv, placement.num_decodes
        entries = min(size, kv.max_rows)
        tokens: list[npt.NDArray[np.integer]] = [
            _pad(placement.ids, size, 0),
            _pad(placement.positions, size, 0),
            _pad(placement.slots, size, kv.num_pages * kv.page_size),
        ]
        lens = placement.cached[:n] + 1
        decodes = [_pad(placement.rows[:n], entries, kv.max_rows), _pad(lens, entries, 1), *work.arrays]
        if last is None:
            return tokens + decodes
        starts = n + np.concatenate(([0], np.cumsum(placement.extend[n:])))
        chunks = [
            _pad(placement.rows[n:], entries, kv.max_rows),
            _pad(placement.cached[n:], entries, 0),
            _pad(starts, entries + 1, int(starts[-1])),  # chunks of no tokens
            _pad(last, entries, 0),
        ]
        return tokens + chunks + decodes

    def _step(self, key: _Key, inputs: PackedInts) -> Tensor:
        ids, positions, slots, *rest = inputs.views
        chunks, extend, last = [] if key.kind == "decode" else rest[:4], None, None
        rows, lens, work, *shared = rest[len(chunks) :]
        if chunks:
            extend, last = ExtendPart(chunks[0], chunks[1], chunks[2], len(ids)), chunks[3]
        decode = DecodePart(rows, lens, work, SharedKeys(*shared) if shared else None)
        return self._forward(ids, rows, last, PagedStep(self._backend, positions, slots, decode, extend))


def _free_bytes(device: torch.device) -> float:
    """What the device has left. (What PyTorch keeps of its own may belong to graphs.)"""
    if device.type == "cpu":
        return math.inf
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _decode_sizes(max_bs: int) -> list[int]:
    """Few where padding is cheap: a product of 17 rows costs what one of 32 does."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_bs, 16)]
    return [size for size in sizes if size < max_bs] + [max_bs]


def _mixed_sizes() -> list[int]:
    sizes = [*range(16, 129, 16), *range(192, 1025, 64), *range(1280, 8193, 256)]
    return [size for size in sizes if size <= MOST_GRAPH_TOKENS]


def _pad(values: Ints, size: int, value: int) -> Ints:
    return values if len(values) == size else np.concatenate([values, np.full(size - len(values), value)])
