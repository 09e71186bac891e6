"""Attention over the paged KV pool on CUDA: the kernels of `verl_server.kernels`, wired to a step.

`ModelRunner` owns one `PagedBackend` and has it make a `PagedStep` for each step, which every decoder layer calls.
Entries that decode go to one kernel, whose grid does not depend on lengths (so it can be captured in a CUDA graph),
prefill chunks to another. All indices are int32 tensors on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.kernels.paged_attention import PagedAttention
from verl_server.kernels.rotary import norm_rotate_store
from verl_server.models.attention import Heads, Ints, norm_and_rotate
from verl_server.models.layers import RotaryEmbedding


@dataclass
class DecodePart:
    """Entries with one new token: the first ones of the step."""

    rows: Tensor
    """[n] of the page table."""
    kv_lens: Tensor
    """[n] tokens to attend to, the new one included."""
    work: Tensor
    """How the kernel's programs share the work, see `PagedAttention.host_metadata`."""


@dataclass
class ExtendPart:
    """The other entries: chunks of prompts."""

    rows: Tensor
    cached: Tensor
    """[m] tokens of each entry that come before its new ones."""
    starts: Tensor
    """[m + 1] first new token of each entry, and the end of the last one's."""
    longest: int
    """Most new tokens that an entry may have."""


@dataclass
class PagedStep:
    backend: PagedBackend
    positions: Tensor
    """[tokens]"""
    slots: Tensor
    """[tokens] where each token's key and value go in the pool."""
    decode: DecodePart | None
    extend: ExtendPart | None

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        q = self.backend.rotate_and_store(qkv, heads, kv_layer, self.positions, self.slots)
        table, kernels = self.backend.page_table, self.backend.kernels
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        decode, extend = self.decode, self.extend
        if decode is not None:
            kernels.decode(q, kv_layer, table, decode.rows, decode.kv_lens, decode.work, out)
        if extend is not None:
            kernels.extend(q, kv_layer, table, extend.rows, extend.cached, extend.starts, extend.longest, out)
        return out


class PagedBackend:
    def __init__(
        self, kernels: PagedAttention, rotary: RotaryEmbedding, page_table: Tensor, page_size: int, fused: bool
    ) -> None:
        self.kernels, self.page_table = kernels, page_table
        self._rotary, self._page_size, self._fused = rotary, page_size, fused

    def work(self, kv_lens: Ints) -> npt.NDArray[np.int32]:
        """The decode kernel's share-out for entries of these lengths, maybe none, always of the same length."""
        if len(kv_lens):
            return self.kernels.host_metadata(kv_lens)
        return np.zeros_like(self.kernels.host_metadata(np.ones(1, dtype=np.int64)))

    def rotate_and_store(self, qkv: Tensor, heads: Heads, kv_layer: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Norm and rotate; keys and values go to the pool. Returns the queries [tokens, heads, head_dim]."""
        if self._fused:
            q_weight = None if heads.q_norm is None else heads.q_norm.weight
            k_weight = None if heads.k_norm is None else heads.k_norm.weight
            eps = 0.0 if heads.q_norm is None else heads.q_norm.eps
            cos, sin = self._rotary.tables
            return norm_rotate_store(qkv, q_weight, k_weight, eps, cos, sin, positions, slots, kv_layer)
        states = norm_and_rotate(qkv, heads, *self._rotary.at(positions))
        kv = states[:, heads.num_heads :].view(qkv.shape[0], 2, heads.num_kv_heads, heads.head_dim)
        kv_layer[slots // self._page_size, slots % self._page_size] = kv
        return states[:, : heads.num_heads]
