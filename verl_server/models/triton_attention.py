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

from verl_server.kernels.device_arrays import Ints
from verl_server.kernels.paged_attention import PagedAttention, SharedKeys
from verl_server.kernels.rotary import norm_rotate_store
from verl_server.kernels.shared_keys import find_runs
from verl_server.models.attention import Heads, norm_and_rotate
from verl_server.models.layers import RotaryEmbedding

_LEAST_KEYS = 64
"""Shorter runs are each entry's own."""
_LEAST_SAVED = 256 * 2**20
"""Bytes of a layer's keys and values that are not read again, from which on a second kernel pays. (On one H200 126 MB
cost 7 us more than they saved, 470 MB saved 95 us; on four, of whose KV heads each has two, 251 MB cost a step 4 %.)"""


@dataclass
class DecodePart:
    """Entries with one new token: the first ones of the step."""

    rows: Tensor
    """[n] of the page table."""
    kv_lens: Tensor
    """[n] tokens to attend to, the new one included."""
    work: Tensor
    """How the kernel's programs share the work, see `PagedAttention.host_metadata`."""
    shared: SharedKeys | None = None
    """Keys that entries have in common, if it pays to read them once."""


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
            kernels.decode(q, kv_layer, table, decode.rows, decode.kv_lens, decode.work, out, decode.shared)
        if extend is not None:
            kernels.extend(q, kv_layer, table, extend.rows, extend.cached, extend.starts, extend.longest, out)
        return out


@dataclass
class _Found:
    """What entries were found to share. It holds while the same ones decode: what they append is each one's own."""

    rows: Ints
    kv_lens: Ints
    """[n] when they were last seen."""
    pages: Ints
    """[n, columns] the page table's then, as far as anything is shared."""
    shared: SharedKeys | None
    """None if it is too little to pay for a second kernel."""

    def holds(self, table: Ints, rows: Ints, kv_lens: Ints) -> bool:
        """A row may have been given to another request meanwhile: lengths and pages are looked at, too."""
        return (
            np.array_equal(rows, self.rows)
            and bool(((kv_lens == self.kv_lens) | (kv_lens == self.kv_lens + 1)).all())
            and np.array_equal(table[rows, : self.pages.shape[1]], self.pages)
        )


@dataclass
class DecodeWork:
    """How the kernels deal out a step's decodes, on the host."""

    work: npt.NDArray[np.int32]
    shared: SharedKeys | None

    @property
    def arrays(self) -> list[npt.NDArray[np.integer]]:
        return [self.work, *(self.shared or ())]


class PagedBackend:
    """`page_table` is the one on the device, `host_table` the one that a step's work is planned by."""

    def __init__(
        self,
        kernels: PagedAttention,
        rotary: RotaryEmbedding,
        page_table: Tensor,
        host_table: Ints,
        page_size: int,
        *,
        fused: bool,
    ) -> None:
        self.kernels, self.page_table = kernels, page_table
        self._rotary, self._host_table, self._page_size = rotary, host_table, page_size
        self._fused = fused
        self.cascade = kernels.most_shared > 0
        """Whether keys that entries share may be read once for all of them."""
        self._found: _Found | None = None

    def deal_out(self, rows: Ints, kv_lens: Ints, *, cascade: bool = True) -> DecodeWork:
        """The work of entries that decode, maybe none; `work` is always of the same length.

        With `cascade`, if there is any, keys that they share are apart where it pays.
        """
        if not len(rows):
            return self.no_work()
        shared = self._shared_keys(rows, kv_lens) if cascade and self.cascade and len(rows) > 1 else None
        own = kv_lens if shared is None else kv_lens - shared.starts
        return DecodeWork(self.kernels.host_metadata(own), shared)

    def no_work(self, *, shared: bool = False) -> DecodeWork:
        """Of a step without decodes; with arrays for shared keys, if these are wanted."""
        work = np.zeros_like(self.kernels.host_metadata(np.ones(1, dtype=np.int64)))
        none = np.zeros(0, dtype=np.int64)
        return DecodeWork(work, SharedKeys(none, none, none, np.zeros(2, dtype=np.int64)) if shared else None)

    def capacities(self, entries: int, *, shared: bool) -> list[int]:
        """Lengths that are enough for `DecodeWork.arrays` of so many entries."""
        work = len(self.no_work().work)
        return [work, *[entries] * 3, self.kernels.most_items(entries)] if shared else [work]

    def _shared_keys(self, rows: Ints, kv_lens: Ints) -> SharedKeys | None:
        """None if too little is shared to pay for a second kernel. All ranks find the same."""
        if self._found is None or not self._found.holds(self._host_table, rows, kv_lens):
            self._found = self._find(rows, kv_lens)
        self._found.kv_lens = kv_lens.copy()
        return self._found.shared

    def _find(self, rows: Ints, kv_lens: Ints) -> _Found:
        runs = find_runs(self._host_table, rows, kv_lens, self._page_size, _LEAST_KEYS)
        pays = runs.saved * self.kernels.token_bytes >= _LEAST_SAVED
        columns = int(runs.end.max(initial=0)) // self._page_size
        shared = self.kernels.shared_keys(runs) if pays else None
        return _Found(rows.copy(), kv_lens.copy(), self._host_table[rows, :columns], shared)

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
