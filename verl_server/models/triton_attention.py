"""Attention over the paged KV pool on CUDA, with the Triton kernels of `verl_server.kernels`.

`ModelRunner` owns one `PagedBackend` and builds a `PagedStep` for each step, which every decoder layer calls. One
kernel computes decodes; its grid does not depend on lengths, so it can be captured in a CUDA graph. Another kernel
computes prefill chunks. All indices are int32 tensors on the device.
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

_MIN_RUN_KEYS = 64
"""Number of keys that a shared run must have. Every entry reads shorter runs by itself."""
_MIN_SAVED_BYTES = 256 * 2**20
"""Bytes of keys and values of a layer that cascade attention must save to be worth a second kernel. (Measured on one
H200: saving 126 MB cost 7 us, saving 470 MB gained 95 us. On four H200s with two KV heads each: saving 251 MB made a
step 4 % slower.)"""


@dataclass
class DecodePart:
    """The first entries of the step, which have one new token each."""

    rows: Tensor
    """[n] rows of the page table."""
    kv_lens: Tensor
    """[n] number of tokens to attend to, the new one included."""
    work: Tensor
    """The part of the work that each program of the kernel does, see `PagedAttention.host_metadata`."""
    shared: SharedKeys | None = None
    """Runs of keys that several entries share, if cascade attention reads them once for all of these."""


@dataclass
class ExtendPart:
    """The other entries of the step, which are chunks of prompts."""

    rows: Tensor
    """[m] rows of the page table."""
    cached: Tensor
    """[m] number of tokens that come before the entry's new tokens."""
    starts: Tensor
    """[m + 1] index of each entry's first new token, and last the number of new tokens of all entries."""
    longest: int
    """Upper bound of the number of new tokens of an entry."""


@dataclass
class PagedStep:
    backend: PagedBackend
    positions: Tensor
    """[tokens] position of each new token in its sequence."""
    slots: Tensor
    """[tokens] where the key and value of each token are stored in the pool: page * page_size + offset."""
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
class _SharedSearch:
    """A result of the search for shared keys. It stays valid while the same entries decode, since the keys that an
    entry appends are never shared."""

    rows: Ints
    """[n] row of each entry in the page table."""
    kv_lens: Ints
    """[n] lengths of the entries in the last step that used this result."""
    pages: Ints
    """[n, columns] page ids of the entries at the time of the search, up to the last column that is shared."""
    shared: SharedKeys | None
    """None if reading the shared keys once saves too little to be worth a second kernel."""

    def is_valid_for(self, table: Ints, rows: Ints, kv_lens: Ints) -> bool:
        """Return True if the entries are the same.

        Lengths and pages are compared as well as rows, because a row may have been assigned to another request.
        """
        return (
            np.array_equal(rows, self.rows)
            and bool(((kv_lens == self.kv_lens) | (kv_lens == self.kv_lens + 1)).all())
            and np.array_equal(table[rows, : self.pages.shape[1]], self.pages)
        )


@dataclass
class DecodeWork:
    """The assignment of a step's decodes to the programs of the kernels, on the host."""

    work: npt.NDArray[np.int32]
    shared: SharedKeys | None

    @property
    def arrays(self) -> list[npt.NDArray[np.integer]]:
        return [self.work, *(self.shared or ())]


class PagedBackend:
    """Plans and runs attention with `kernels`.

    `page_table` [rows, columns] int32 is on the device and is read by the kernels. `host_table` holds the same ids on
    the host and is read when a step is planned. `fused` selects the fused kernel for norm, rotation and storing, and
    `pdl` lets that kernel begin while the one before it ends (`kernels.dependent`).
    """

    def __init__(
        self,
        kernels: PagedAttention,
        rotary: RotaryEmbedding,
        page_table: Tensor,
        host_table: Ints,
        page_size: int,
        *,
        fused: bool,
        pdl: bool = False,
    ) -> None:
        self.kernels, self.page_table = kernels, page_table
        self._rotary, self._host_table, self._page_size = rotary, host_table, page_size
        self._fused, self._pdl = fused, pdl
        self.cascade = kernels.max_shared_entries > 0
        """True if cascade attention is enabled: keys that entries share may be read once for all of them."""
        self._last_search: _SharedSearch | None = None

    def plan_decodes(self, rows: Ints, kv_lens: Ints, *, cascade: bool = True) -> DecodeWork:
        """Return the work of the entries that decode, of which there may be none. `work` always has the same length.

        With `cascade`, keys that entries share are read once if this saves at least `_MIN_SAVED_BYTES`.
        """
        if not len(rows):
            return self.empty_work()
        shared = self._shared_keys(rows, kv_lens) if cascade and self.cascade and len(rows) > 1 else None
        own = kv_lens if shared is None else kv_lens - shared.starts
        return DecodeWork(self.kernels.host_metadata(own), shared)

    def empty_work(self, *, shared: bool = False) -> DecodeWork:
        """Return the work of a step without decodes. With `shared` it has (empty) arrays for shared keys."""
        work = np.zeros_like(self.kernels.host_metadata(np.ones(1, dtype=np.int64)))
        none = np.zeros(0, dtype=np.int64)
        return DecodeWork(work, SharedKeys(none, none, none, np.zeros(2, dtype=np.int64)) if shared else None)

    def capacities(self, entries: int, *, shared: bool) -> list[int]:
        """Return lengths that suffice for `DecodeWork.arrays` of any step with up to `entries` decodes."""
        work = len(self.empty_work().work)
        return [work, *[entries] * 3, self.kernels.max_items_length(entries)] if shared else [work]

    def _shared_keys(self, rows: Ints, kv_lens: Ints) -> SharedKeys | None:
        """Return the shared keys of these entries, or None if too few are shared. All ranks get the same result."""
        if self._last_search is None or not self._last_search.is_valid_for(self._host_table, rows, kv_lens):
            self._last_search = self._search(rows, kv_lens)
        self._last_search.kv_lens = kv_lens.copy()
        return self._last_search.shared

    def _search(self, rows: Ints, kv_lens: Ints) -> _SharedSearch:
        runs = find_runs(self._host_table, rows, kv_lens, self._page_size, _MIN_RUN_KEYS)
        is_worth_it = runs.saved * self.kernels.token_bytes >= _MIN_SAVED_BYTES
        columns = int(runs.end.max(initial=0)) // self._page_size
        shared = self.kernels.shared_keys(runs) if is_worth_it else None
        return _SharedSearch(rows.copy(), kv_lens.copy(), self._host_table[rows, :columns], shared)

    def rotate_and_store(self, qkv: Tensor, heads: Heads, kv_layer: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Norm and rotate queries and keys, store keys and values in the pool, and return the queries.

        `qkv` is [tokens, (heads + 2 * kv_heads) * head_dim]. `positions` and `slots` are [tokens]. `kv_layer` is one
        layer of the pool of `KVCache`. The queries are [tokens, heads, head_dim].
        """
        if self._fused:
            q_weight = None if heads.q_norm is None else heads.q_norm.weight
            k_weight = None if heads.k_norm is None else heads.k_norm.weight
            eps = 0.0 if heads.q_norm is None else heads.q_norm.eps
            cos, sin = self._rotary.tables
            return norm_rotate_store(qkv, q_weight, k_weight, eps, cos, sin, positions, slots, kv_layer, pdl=self._pdl)
        states = norm_and_rotate(qkv, heads, *self._rotary.at(positions))
        kv = states[:, heads.num_heads :].view(qkv.shape[0], 2, heads.num_kv_heads, heads.head_dim)
        kv_layer[slots // self._page_size, slots % self._page_size] = kv
        return states[:, : heads.num_heads]
