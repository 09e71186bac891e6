"""Attention over the paged KV pool on the CPU, with the compiled kernel of `kernels.cpu`.

`ModelRunner` owns one `CpuAttention`, which plans a `CpuStep` for each step; every decoder layer calls that step. The
kernel norms, rotates and stores all new tokens. For decodes it also computes attention, and reads their pages in place.
Attention of prompt tokens is computed in PyTorch, in the groups of `attention.plan_groups`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verl_server.kernels.cpu.kernels import LANES, AttentionArgs, CpuKernels
from verl_server.kernels.device_arrays import Ints
from verl_server.models.attention import AttentionGroup, Heads, Placement, attend_groups, plan_groups, split_heads
from verl_server.models.layers import RotaryEmbedding


class PagedPool(Protocol):
    """The part of a `KVCache` that this backend reads."""

    kv_heads: int
    page_size: int
    page_table: Ints
    layers: list[Tensor]

    def trimmed_table(self, rows: Ints, lens: Ints) -> Ints: ...


@dataclass
class CpuStep:
    kernels: CpuKernels
    args: AttentionArgs
    """Arguments of the kernel. `attend` fills in the fields that differ between layers."""
    placement: Placement
    """Keeps the arrays alive that `args` points to."""
    scores: Tensor
    """Scratch memory [threads, query heads per KV head, stride] fp32. `args` points to it, too."""
    groups: list[AttentionGroup]
    """Groups of the entries that do not decode; these follow the decodes in the batch."""

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        args, decodes = self.args, self.placement.num_decodes
        out = qkv.new_empty(qkv.shape[0], heads.num_heads * heads.head_dim)
        args.qkv, args.out, args.pool = qkv.data_ptr(), out.data_ptr(), kv_layer.data_ptr()
        if heads.q_norm is not None and heads.k_norm is not None:
            args.q_weight, args.k_weight = heads.q_norm.weight.data_ptr(), heads.k_norm.weight.data_ptr()
            args.eps = heads.q_norm.eps
        self.kernels.attend(args)
        if self.groups:
            q, kv = split_heads(qkv[decodes:].view(qkv.shape[0] - decodes, -1, heads.head_dim), heads)
            attended = attend_groups(q, kv, kv_layer, self.groups)
            if not decodes:
                return attended
            out[decodes:] = attended
        return out


class CpuAttention:
    def __init__(self, kernels: CpuKernels, rotary: RotaryEmbedding, kv: PagedPool, num_heads: int) -> None:
        self._kernels, self._kv, self._num_heads = kernels, kv, num_heads
        self._cos, self._sin = rotary.tables

    def plan(self, placement: Placement) -> CpuStep:
        kv, layer, n = self._kv, self._kv.layers[0], placement.num_decodes
        longest = int(placement.positions[:n].max(initial=0)) + 1
        stride = -(-longest // LANES) * LANES + LANES
        scores = layer.new_empty(self._kernels.threads, self._num_heads // kv.kv_heads, stride)
        args = AttentionArgs(
            cosines=self._cos.data_ptr(),
            sines=self._sin.data_ptr(),
            positions=placement.positions.ctypes.data,
            slots=placement.slots.ctypes.data,
            rows=placement.rows.ctypes.data,
            table=kv.page_table.ctypes.data,
            columns=kv.page_table.shape[1],
            tokens=len(placement.positions),
            decodes=n,
            heads=self._num_heads,
            kv_heads=kv.kv_heads,
            head_dim=layer.shape[-1],
            page_size=kv.page_size,
            threads=self._kernels.threads,
            scores=scores.data_ptr(),
            stride=stride,
        )
        groups: list[AttentionGroup] = []
        if n < len(placement.rows):
            cached, extend = placement.cached[n:], placement.extend[n:]
            table = kv.trimmed_table(placement.rows[n:], cached + extend)
            groups = plan_groups(cached, extend, table, self._num_heads, layer)
        return CpuStep(self._kernels, args, placement, scores, groups)
