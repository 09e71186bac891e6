"""Attention over the paged KV pool on CUDA: `PagedAttention`, its workspaces and the launches of its kernels.

`models.triton_attention.PagedBackend` owns one `PagedAttention` for all layers, and calls it between storing a step's
keys and the output projection. A KV layer is [pages, page_size, 2 (k, v), kv_heads, head_dim] with any strides, except
that the last dimension is dense. Nothing is read beyond the length of an entry, so pages need not be cleared. Calls
must be on one stream at a time, because layers share the workspaces.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from verl_server.kernels import dependent, gpu
from verl_server.kernels.attention_decode import decode_kernel
from verl_server.kernels.attention_extend import extend_kernel
from verl_server.kernels.attention_shared import shared_kernel
from verl_server.kernels.attention_tiles import DecodeConfig, ExtendConfig, SharedConfig
from verl_server.kernels.shared_keys import ITEM, LEVELS, Runs, plan_items


class SharedKeys(NamedTuple):
    """The shared keys of a step's n decodes: integer arrays on the host, or int32 tensors on the device."""

    order: Any
    """[n] entries, sorted so that those that share a run are adjacent."""
    starts: Any
    """[n] number of shared keys of each entry: its own keys begin there."""
    levels: Any
    """[n] number of runs that these shared keys consist of."""
    items: Any
    """[number of items, n, then the items of `shared_keys.plan_items`], padded."""


class PagedAttention:
    """Paged attention for the head layout of one model, for all of its layers.

    `decode_config` and `shared_config` override the choices of `attention_tiles`. `max_shared_entries` is the largest
    number of decodes of a step with shared keys; 0 disables cascade attention. `pdl`: see `dependent`; no kernel that
    may still run writes the indices of a step. On a machine without a GPU the kernels run in Triton's interpreter,
    which is for tests.
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
        max_shared_entries: int = 0,
        pdl: bool = False,
    ) -> None:
        self._kv_heads, self._group, self._head_dim = kv_heads, num_heads // kv_heads, head_dim
        self._page_size, self._dtype, self.max_shared_entries = page_size, dtype, max_shared_entries
        self.token_bytes = 2 * kv_heads * head_dim * dtype.itemsize
        """Bytes of the keys and values of a token in one layer."""
        self._scale = math.log2(math.e) / math.sqrt(head_dim)
        self._block_d = max(16, triton.next_power_of_2(head_dim))
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._limits = gpu.limits(device)
        self.decode_config = decode_config or DecodeConfig.of(head_dim, dtype.itemsize, self._limits)
        self._launch = dependent.options(pdl)
        self._multiprocessors = gpu.multiprocessors(device, interpreted=4)
        self._programs = self._multiprocessors * self.decode_config.programs_per_sm
        # Each program stores at most two parts of unfinished heads; see decode_kernel.
        self._parts = _softmax_parts(2 * self._programs * self._group, head_dim, device)
        self._arrivals = torch.zeros(self._programs, dtype=torch.int32, device=device)
        self.shared_config = shared_config or SharedConfig.of(head_dim, dtype.itemsize, self._group, self._limits)
        self._shared_programs = self._multiprocessors * self.shared_config.programs_per_sm
        # One slot for each head of a chunk; see shared_keys.plan_items.
        self._slots = 3 * self._shared_programs // kv_heads + 1
        rows = LEVELS * max_shared_entries * num_heads
        self._shared = _softmax_parts(rows, head_dim, device)
        rows = self._slots * kv_heads * self.shared_config.rows if max_shared_entries else 0
        self._chunks = _softmax_parts(rows, head_dim, device)
        self._chunk_arrivals = torch.zeros(self._slots * kv_heads, dtype=torch.int32, device=device)

    def host_metadata(self, kv_lens: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Return the distribution of decode work over the programs, for `kv_lens` [n], each >= 1; n >= 1.

        Return int32 of constant length: [units per program, number of programs with one unit more, number of programs
        with any units, index of the last entry, then (entry, head, block) of the first unit of each program]. Entries
        beyond n get no work: their output is not written.
        """
        blocks = -(-kv_lens.astype(np.int64) // self.decode_config.block)
        ends = np.cumsum(blocks * self._kv_heads)
        units, last = int(ends[-1]), len(ends) - 1
        # Small steps use one program per multiprocessor. More programs run only if each has four units, since a head
        # that is divided between programs must be merged.
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

    def max_items_length(self, entries: int) -> int:
        """Return a length of `SharedKeys.items` that suffices for any step with up to `entries` decodes."""
        # A level has fewer tiles than entries, because every tile except the last of a run has at least two entries.
        # Tiles that have several chunks need one item more for each slot, at most.
        return 2 + ITEM * (LEVELS * entries + self._slots)

    def shared_keys(self, runs: Runs) -> SharedKeys:
        """Return the work on the shared keys of a step. Call `host_metadata` with lengths less the result's `starts`.

        Raise ValueError if the step has more than `max_shared_entries` decodes.
        """
        if len(runs.order) > self.max_shared_entries:
            raise ValueError(
                f"The step has {len(runs.order)} decodes, but there is memory for the shared keys of "
                f"{self.max_shared_entries}."
            )
        items = plan_items(
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
        """Attend from each entry's newest token, q [n, heads, head_dim], whose key and value are in the pool already.

        `rows` and `kv_lens` (the new token included) are int32 [n], `page_table` is int32 [rows, columns], and `meta`
        is `host_metadata` of the same lengths less `shared.starts`. The result [n, heads * head_dim] is written to
        `out`, contiguous, or to a new tensor. The launch depends on no value, so it can be captured in a CUDA graph.
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
            num_warps=config.warps, **self._launch,
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
            STAGES=config.stages, PRECISION=self._precision, num_warps=config.warps, **self._launch,
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
        """Attend causally from new tokens, q [T, heads, head_dim], whose keys and values are in the pool already.

        The new tokens of entry e are rows q_starts[e] to q_starts[e + 1] - 1 of q, and follow its cached[e] earlier
        tokens. `rows` and `cached` are int32 [m], `q_starts` is int32 [m + 1] from 0 to T. `max_extend` is the largest
        number of new tokens of an entry, which decides the tile size. Return [T, heads * head_dim]: `out` if given.
        """
        if out is None:
            out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        config = ExtendConfig.of(self._head_dim, self._dtype.itemsize, self._group, max_extend, self._limits)
        block_q = config.rows // self._group
        entries = rows.shape[0]
        extend_kernel[(self._kv_heads, q.shape[0] // block_q + entries)](
            out, q, kv_layer, page_table, rows, cached, q_starts, entries,
            self._scale, q.stride(0), q.stride(1), page_table.stride(0), *kv_layer.stride()[:4],
            KV_HEADS=self._kv_heads, GROUP=self._group, D=self._head_dim, PAGE=self._page_size,
            BLOCK_Q=block_q, BLOCK_M=config.rows, BLOCK_N=config.keys, BLOCK_D=self._block_d,
            STAGES=config.stages, PRECISION=self._precision, num_warps=config.warps, maxnreg=config.registers,
            **self._launch,
        )  # fmt: skip
        return out


def shared_bytes(entries: int, num_heads: int, head_dim: int) -> int:
    """Return the bytes of the workspace for the shared keys of up to `entries` decodes."""
    return LEVELS * entries * num_heads * (head_dim + 2) * 4


def _softmax_parts(rows: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Workspace for softmaxes over a part of the keys: weighted values [rows, head_dim], maxima [rows], sums [rows],
    all fp32."""
    acc = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
    return acc, acc.new_empty(rows), acc.new_empty(rows)
