"""Attention over the paged KV pool on CUDA: `PagedAttention`, its workspaces and how its kernels are launched.

The model runner owns one for all layers and calls it between storing a step's keys and the output projection. A KV
layer is [pages, page_size, 2 (k, v), kv_heads, head_dim] with any strides but a dense last dimension. Nothing is
read beyond an entry's length, so pages need no clearing. One stream at a time: layers share the workspaces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from verl_server.kernels.attention_decode import decode_kernel
from verl_server.kernels.attention_extend import extend_kernel
from verl_server.kernels.attention_shared import shared_kernel
from verl_server.kernels.shared_keys import ITEM, LEVELS, Runs, deal_out


@dataclass(frozen=True)
class DecodeConfig:
    """How decode uses one GPU; chosen by measurement (`benchmarks/attention.py`)."""

    block: int
    """Keys in a unit of work."""
    warps: int
    stages: int
    """One more than the blocks that are loaded ahead."""
    programs_per_sm: int

    @classmethod
    def of(cls, head_dim: int, itemsize: int) -> DecodeConfig:
        """Blocks of at most 16 KiB of keys: three programs fit into a multiprocessor. Small ones come two ahead."""
        row = triton.next_power_of_2(head_dim) * itemsize
        block = max(16, min(64, 16384 // row))
        return cls(block, warps=4, stages=2 if block * row >= 16384 else 3, programs_per_sm=3)


@dataclass(frozen=True)
class ExtendConfig:
    """A tile of prefill: `rows` of (token, query head) against blocks of `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None
    """Bound for a thread, so that more than one program fits into a multiprocessor."""

    @classmethod
    def of(cls, head_dim: int, itemsize: int, group: int, max_extend: int) -> ExtendConfig:
        """Prompts and chunks of middling length hide latency with two small programs in a multiprocessor.

        Long ones, and short ones (which matter when they follow long histories), run best as one with large blocks.
        """
        row = triton.next_power_of_2(head_dim) * itemsize
        if row > 256:
            return cls(rows=64, keys=max(16, min(32, 16384 // row)), warps=4, stages=2, registers=None)
        if 128 <= max_extend < 2048:
            return cls(rows=128, keys=32, warps=8, stages=3, registers=128)
        rows = 64 if max_extend * group <= 64 else 128
        return cls(rows, keys=64, warps=rows // 16, stages=3, registers=None)


@dataclass(frozen=True)
class SharedConfig:
    """A tile of keys that entries share: `rows` of (entry, query head) against blocks of `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs_per_sm: int

    @classmethod
    def of(cls, head_dim: int, itemsize: int, group: int) -> SharedConfig:
        row = triton.next_power_of_2(head_dim) * itemsize
        keys = max(16, min(64, 16384 // row))
        stages = 3 if row <= 256 else 2  # or a program takes more shared memory than GPUs before Hopper have
        return cls(max(64, 2 * triton.next_power_of_2(group)), keys, warps=4, stages=stages, programs_per_sm=2)


class SharedKeys(NamedTuple):
    """What decode needs to know of keys that entries share: int32, on the host or the device."""

    order: Any
    """[n] entries; those that share a run stand next to each other."""
    starts: Any
    """[n] where each entry's own keys begin."""
    levels: Any
    """[n] in how many runs the keys before lie."""
    items: Any
    """How many, n, and `shared_keys.deal_out`'s items; padded."""


class PagedAttention:
    """Paged attention for one model's head layout, for all of its layers.

    `decode_config` overrides the measured choice. On a machine without a GPU the kernels run in Triton's
    interpreter, which is for tests. With `most_shared`, steps of up to so many entries may have shared keys.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        decode_config: DecodeConfig | None = None,
        shared_config: SharedConfig | None = None,
        most_shared: int = 0,
    ) -> None:
        self._kv_heads, self._group, self._head_dim = kv_heads, num_heads // kv_heads, head_dim
        self._page_size, self._dtype, self.most_shared = page_size, dtype, most_shared
        self.token_bytes = 2 * kv_heads * head_dim * dtype.itemsize
        """Of a token's keys and values in one layer."""
        self._scale = math.log2(math.e) / math.sqrt(head_dim)
        self._block_d = max(16, triton.next_power_of_2(head_dim))
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self.decode_config = decode_config or DecodeConfig.of(head_dim, dtype.itemsize)
        self._multiprocessors = _multiprocessors(device)
        self._programs = self._multiprocessors * self.decode_config.programs_per_sm
        # Two parts of unfinished heads a program; see decode_kernel.
        self._parts = _softmax_parts(2 * self._programs * self._group, head_dim, device)
        self._arrivals = torch.zeros(self._programs, dtype=torch.int32, device=device)
        self.shared_config = shared_config or SharedConfig.of(head_dim, dtype.itemsize, self._group)
        self._shared_programs = self._multiprocessors * self.shared_config.programs_per_sm
        # A slot for each head of a chunk; see shared_keys.deal_out.
        self._slots = 3 * self._shared_programs // kv_heads + 1
        rows = LEVELS * most_shared * num_heads
        self._shared = _softmax_parts(rows, head_dim, device)
        rows = self._slots * kv_heads * self.shared_config.rows if most_shared else 0
        self._chunks = _softmax_parts(rows, head_dim, device)
        self._chunk_arrivals = torch.zeros(self._slots * kv_heads, dtype=torch.int32, device=device)

    def host_metadata(self, kv_lens: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """How decode's work is dealt out over the programs, for `kv_lens` [n], each >= 1; n >= 1.

        Its length never changes: [share, programs with one unit more, programs with any, last entry, then (entry,
        head, block) of each program's first unit]. Entries beyond n get no work: their output stays unwritten.
        """
        blocks = -(-kv_lens.astype(np.int64) // self.decode_config.block)
        ends = np.cumsum(blocks * self._kv_heads)
        units, last = int(ends[-1]), len(ends) - 1
        # Small steps occupy every multiprocessor, but no more programs than have four units each: parts cost merging.
        active = min(self._programs, max(min(units, self._multiprocessors), units // 4))
        share, larger = divmod(units, active)
        program = np.arange(self._programs)
        first = np.minimum(program * share + np.minimum(program, larger), units - 1)
        entry = np.searchsorted(ends, first, side="right")
        within = first - (ends[entry] - blocks[entry] * self._kv_heads)
        meta = np.empty(4 + 3 * self._programs, dtype=np.int32)
        meta[:4] = share, larger, active, last
        meta[4:] = np.stack([entry, *np.divmod(within, blocks[entry])], axis=1).reshape(-1)
        return meta

    def most_items(self, entries: int) -> int:
        """Length of `SharedKeys.items` that is enough for any step of so many entries."""
        # A tile has two entries at least but for a run's last; without chunks a level has less than one for each entry.
        return 2 + ITEM * (LEVELS * entries + self._slots)

    def shared_keys(self, runs: Runs) -> SharedKeys:
        """For a step whose entries share `runs`; `host_metadata` then takes the lengths less its `starts`."""
        if len(runs.order) > self.most_shared:
            raise ValueError(f"{len(runs.order)} entries, but memory for the shared keys of {self.most_shared}.")
        items = deal_out(
            runs,
            tile=self.shared_config.rows // self._group,
            grain=math.lcm(self.shared_config.keys, self._page_size),
            heads=self._kv_heads,
            programs=self._shared_programs,
            slots=self._slots,
        )
        header = np.array([len(items), len(runs.order)])
        return SharedKeys(runs.order, *runs.per_entry(), np.concatenate([header, items.reshape(-1)]))

    def decode(
        self,
        q: Tensor,
        kv_layer: Tensor,
        page_table: Tensor,
        rows: Tensor,
        kv_lens: Tensor,
        meta: Tensor,
        out: Tensor | None = None,
        shared: SharedKeys | None = None,
    ) -> Tensor:
        """Attend from each entry's newest token, whose key is stored: q [n, heads, head_dim] -> [n, heads * head_dim].

        `rows`, `kv_lens` (the new token included) int32 [n]; `page_table` int32 [rows, columns]; `meta` is
        `host_metadata` of the same lengths, less what is `shared`; `out`, if given, is where the result goes,
        contiguous. The launch depends on no value, so it can be captured in a CUDA graph.
        """
        if out is None:
            out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if shared is not None:
            self._attend_shared(q, kv_layer, page_table, rows, shared)
        config = self.decode_config
        block_rows = triton.next_power_of_2(self._group)
        decode_kernel[(self._programs,)](
            out, q, kv_layer, page_table, rows, kv_lens, meta,
            *self._parts, self._arrivals,
            *((None, None) if shared is None else (shared.starts, shared.levels)), *self._shared,
            self._scale, q.stride(0), q.stride(1), page_table.stride(0), *kv_layer.stride()[:4],
            KV_HEADS=self._kv_heads, GROUP=self._group, D=self._head_dim, PAGE=self._page_size,
            BLOCK=config.block, BLOCK_M=max(16, block_rows),
            BLOCK_ROWS=block_rows, BLOCK_D=self._block_d, AT_ONCE=max(1, min(16, 64 // block_rows)),
            STAGES=config.stages, LEVELS=0 if shared is None else LEVELS, PRECISION=self._precision,
            num_warps=config.warps,
        )  # fmt: skip
        return out

    def _attend_shared(self, q: Tensor, kv_layer: Tensor, page_table: Tensor, rows: Tensor, shared: SharedKeys) -> None:
        config = self.shared_config
        shared_kernel[(self._shared_programs,)](
            q, kv_layer, page_table, rows, shared.order, shared.items,
            *self._shared, *self._chunks, self._chunk_arrivals,
            self._scale, q.stride(0), q.stride(1), page_table.stride(0), *kv_layer.stride()[:4],
            KV_HEADS=self._kv_heads, GROUP=self._group, D=self._head_dim, PAGE=self._page_size, ITEM=ITEM,
            BLOCK_M=config.rows, BLOCK_N=config.keys, BLOCK_D=self._block_d,
            STAGES=config.stages, PRECISION=self._precision, num_warps=config.warps,
        )  # fmt: skip

    def extend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        page_table: Tensor,
        rows: Tensor,
        cached: Tensor,
        q_starts: Tensor,
        max_extend: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend from new tokens whose keys are stored, causally: q [T, heads, head_dim] -> [T, heads * head_dim].

        Entry e's tokens are q_starts[e] .. q_starts[e + 1] of q and follow its cached[e] earlier ones. `rows`,
        `cached` int32 [m], `q_starts` int32 [m + 1] from 0 to T; `max_extend` is the longest entry's, which decides
        the tile size.
        """
        if out is None:
            out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        config = ExtendConfig.of(self._head_dim, self._dtype.itemsize, self._group, max_extend)
        block_q = config.rows // self._group
        entries = rows.shape[0]
        extend_kernel[(self._kv_heads, q.shape[0] // block_q + entries)](
            out, q, kv_layer, page_table, rows, cached, q_starts, entries,
            self._scale, q.stride(0), q.stride(1), page_table.stride(0), *kv_layer.stride()[:4],
            KV_HEADS=self._kv_heads, GROUP=self._group, D=self._head_dim, PAGE=self._page_size,
            BLOCK_Q=block_q, BLOCK_M=config.rows, BLOCK_N=config.keys, BLOCK_D=self._block_d,
            STAGES=config.stages, PRECISION=self._precision, num_warps=config.warps, maxnreg=config.registers,
        )  # fmt: skip
        return out


def _softmax_parts(rows: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for softmaxes over some of the keys: weighted values [rows, head_dim], maxima [rows], sums [rows]; fp32."""
    acc = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
    return acc, acc.new_empty(rows), acc.new_empty(rows)


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
