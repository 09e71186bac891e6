"""Attention over the paged KV pool in plain PyTorch: planned once a step, then run by every layer.

`ModelRunner` builds an `AttentionPlan` per step from the lengths and the page table; each decoder layer calls the
plan's `attend`. Entries of similar size are packed into padded groups. Prompts without a cached prefix attend to their
own new tokens; all other entries (decode, later chunks, prefix hits) gather their pages from the pool. This module is
the fallback on every device. `triton_attention` and `cpu_attention` run kernels behind the same interface, and
`cpu_attention` uses the groups of this module for prompts.

A KV layer is [pages, page_size, 2 (k, v), kv_heads, head_dim], in memory [pages, 2, kv_heads, page_size, head_dim]:
a page is gathered in slices, each of which holds one head's keys or values. The last page is never written: page lists
are padded with it. Masked positions still enter `0 * v`, so their values must be finite, which is why `KVCache` zeroes
a page when it allocates the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.models.layers import RMSNorm, rotate
from verl_server.models.ops import unit_rms

_FREE_PADDING = 4096
"""Number of padded query-key pairs that cost less than one more group."""

_GATHERED_BYTES = 2**23
"""Bytes of keys and values gathered at once on the CPU. They are still in the processor's cache when attention reads
them, and the C library reuses the block. (A block above 32 MiB is mapped anew and filled with zeros each time, which
doubles the time of a step.)"""


@dataclass(slots=True)
class Placement:
    """One step's indices, int64 on the host. Entries are in batch order: first decodes, then prefill chunks."""

    rows: Ints
    """[entries] row of each entry in the page table."""
    cached: Ints
    """[entries] number of tokens whose keys and values are in the pool already."""
    extend: Ints
    """[entries] number of new tokens."""
    ids: Ints
    """[tokens] token ids. -1 stands for the token that the entry's row sampled last, which only the device knows."""
    positions: Ints
    """[tokens] position of each new token in its sequence."""
    slots: Ints
    """[tokens] where the key and value of each new token are stored: page * page_size + offset."""
    num_decodes: int
    """Number of leading entries with one new token."""

    @property
    def starts(self) -> Ints:
        """[entries] index of each entry's first new token."""
        return np.cumsum(self.extend) - self.extend

    @property
    def last(self) -> Ints:
        """[entries] index of each entry's last new token."""
        return np.cumsum(self.extend) - 1


@dataclass
class AttentionGroup:
    """Entries of the step that are attended to together, padded to `queries` new tokens each."""

    entries: int
    queries: int
    tokens: slice | Tensor
    """Positions of the group's tokens in the step: a slice of entries * queries tokens, or as many int64 indices."""
    outputs: Tensor | None = None
    """Positions of real tokens in the flattened [entries * queries]. None if there is no padding."""
    gathers: list[Gather] | None = None
    """The pool reads of the group's entries, in order. None if the entries are prompts without a cached prefix, which
    attend to the step's own keys."""
    folded: bool = False
    """True if the query heads that share a KV head are treated as additional query rows, so that keys are not expanded.
    """


@dataclass
class Gather:
    """Entries of a group whose keys and values are read from the pool in one operation."""

    slices: Tensor
    """int64 indices of slices of the pool, flattened from [entries, 2 (k, v), kv_heads, pages per entry]."""
    mask: Tensor
    """[entries, 1, queries, keys] values added to the scores: 0, or -inf for hidden keys. If the group is `folded`, the
    third dimension is queries * (query heads per KV head)."""


class Heads(Protocol):
    """The part of a layer's `Attention` module that attention backends read."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None


class AttentionStep(Protocol):
    """The attention of one step, called by every layer: an `AttentionPlan`, a `CpuStep` or a `PagedStep`."""

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        """Norm and rotate queries and keys, store keys and values into `kv_layer`, and attend.

        `qkv` [tokens, (heads + 2 * kv_heads) * head_dim] is the output of the projection, and may be overwritten.
        Return [tokens, heads * head_dim] of the same dtype.
        """


@dataclass
class AttentionPlan:
    slots: tuple[Tensor, Tensor]
    """(page [tokens], offset in the page [tokens]) where the keys and values of each new token are stored."""
    groups: list[AttentionGroup]
    cos: Tensor
    """[tokens, 1, head_dim] fp32: the rows of `RotaryEmbedding`'s table at the positions of the new tokens."""
    sin: Tensor
    """Rows of the table of sines, with the shape and positions of `cos`."""

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        states = norm_and_rotate(qkv, heads, self.cos, self.sin)
        q, kv = split_heads(states, heads)
        kv_layer.index_put_(self.slots, kv)
        return attend_groups(q, kv, kv_layer, self.groups)


def split_heads(states: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return views of states [tokens, heads + 2 * kv_heads, d]: q [tokens, heads, d], kv [tokens, 2, kv_heads, d]."""
    kv = states[:, heads.num_heads :].view(states.shape[0], 2, heads.num_kv_heads, heads.head_dim)
    return states[:, : heads.num_heads], kv


def norm_and_rotate(qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm and rotate queries and keys in place, and return `qkv` as [tokens, heads + 2 * kv_heads, head_dim]."""
    states = qkv.view(qkv.shape[0], -1, heads.head_dim)
    qk = states[:, : heads.num_heads + heads.num_kv_heads]
    normed = qk
    if heads.q_norm is not None and heads.k_norm is not None:
        normed = unit_rms(qk, heads.q_norm.eps)
        normed[:, : heads.num_heads].mul_(heads.q_norm.weight)
        normed[:, heads.num_heads :].mul_(heads.k_norm.weight)
    qk.copy_(rotate(normed, cos, sin))  # back to `qkv`, so that keys and values are adjacent, and stored in one copy
    return states


def plan_attention(
    cached: Ints,
    extend: Ints,
    slots: Ints,
    table: Ints,
    num_heads: int,
    kv_layer: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> AttentionPlan:
    """Form the groups of a step and build every index tensor.

    `table` [entries, pages] holds the page ids of each entry, padded with the padding page. `kv_layer` may be any layer
    of the pool: only its shape, dtype and device are read. `rotary` is (cos, sin) of the plan.
    """
    pages, offsets = to_device(np.stack(np.divmod(slots, kv_layer.shape[1])), kv_layer.device)
    return AttentionPlan((pages, offsets), plan_groups(cached, extend, table, num_heads, kv_layer), *rotary)


def plan_groups(cached: Ints, extend: Ints, table: Ints, num_heads: int, kv_layer: Tensor) -> list[AttentionGroup]:
    """Group entries that are attended to together. The arguments are those of `plan_attention`."""
    device = kv_layer.device
    starts = np.concatenate(([0], np.cumsum(extend)))
    fresh = (cached == 0) & (extend > 1)
    groups = []
    for kind in (True, False):
        for members in _pack(np.flatnonzero(fresh == kind), extend, cached + extend):
            group = _group(members, starts, extend, device)
            if not kind:
                # With a mask, CUDA's fast kernels do not support grouped heads.
                group.folded = device.type == "cuda" or group.queries == 1
                rows = num_heads // kv_layer.shape[3] if group.folded else 1
                group.gathers = _gathers(cached[members], extend[members], table[members], rows, kv_layer)
            groups.append(group)
    return groups


def attend_groups(q: Tensor, kv: Tensor, kv_layer: Tensor, groups: list[AttentionGroup]) -> Tensor:
    """Attend from q [tokens, heads, d], group by group, and return [tokens, heads * d].

    kv [tokens, 2, kv_heads, d] are the keys and values of the same tokens, which are in the pool already.
    """
    tokens, heads, head_dim = q.shape
    if len(groups) == 1 and isinstance(groups[0].tokens, slice):
        return _attend_group(q, kv, kv_layer, groups[0]).reshape(tokens, heads * head_dim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        part = _attend_group(q, kv, kv_layer, group).reshape(-1, heads, head_dim)
        if isinstance(group.tokens, slice):
            out[group.tokens] = part
        elif group.outputs is None:
            out.index_copy_(0, group.tokens, part)
        else:
            out.index_copy_(0, group.tokens[group.outputs], part[group.outputs])
    return out.view(tokens, heads * head_dim)


def _attend_group(q: Tensor, kv: Tensor, kv_layer: Tensor, group: AttentionGroup) -> Tensor:
    """Return [entries, queries, heads, head_dim].

    For a folded group, heads are two dimensions: [.., kv_heads, query heads per KV head, ..].
    """
    n, length = group.entries, group.queries
    q = q[group.tokens].view(n, length, *q.shape[1:])
    if group.gathers is not None:
        return _attend_gathered(q, kv_layer, group.gathers, group.folded)
    # The padding is at the end, where the causal mask hides it from every real query.
    kv = kv[group.tokens].view(n, length, *kv.shape[1:])
    k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _attend_gathered(q: Tensor, kv_layer: Tensor, gathers: list[Gather], folded: bool) -> Tensor:
    n, length, heads, head_dim = q.shape
    kv_heads = kv_layer.shape[3]
    shared = heads // kv_heads
    if folded:
        q = q.view(n, length, kv_heads, shared, head_dim).transpose(1, 2).reshape(n, kv_heads, -1, head_dim)
    else:
        q = q.transpose(1, 2)
    slices = kv_layer.permute(0, 2, 3, 1, 4).view(-1, kv_layer.shape[1] * head_dim)
    parts = []
    for gather, rows in zip(gathers, torch.split(q, gathers[0].mask.shape[0]), strict=True):
        kv = slices.index_select(0, gather.slices).view(rows.shape[0], 2, kv_heads, -1, head_dim)
        k, v = kv.unbind(1)
        parts.append(F.scaled_dot_product_attention(rows, k, v, attn_mask=gather.mask, enable_gqa=not folded))
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    if folded:
        return out.view(n, kv_heads, length, shared, head_dim).transpose(1, 2)
    return out.transpose(1, 2)


def _pack(entries: Ints, queries: Ints, keys: Ints) -> list[Ints]:
    """Divide entries, the largest first, into groups with little padding.

    If all entries have similar lengths, return one group in batch order.
    """
    if len(entries) < 2:
        return [entries] if len(entries) else []
    q, k = queries[entries], keys[entries]
    if q.max() * k.max() * len(entries) <= 1.25 * (q * k).sum() + _FREE_PADDING:
        return [entries]
    order = entries[np.lexsort((-k, -q))]
    groups: list[list[int]] = []
    longest, real = 0, 0
    for entry in order.tolist():
        area = int(queries[entry] * keys[entry])
        widest = max(longest, int(keys[entry]))
        padded = (len(groups[-1]) + 1) * int(queries[groups[-1][0]]) * widest if groups else 0
        if not groups or padded > 1.25 * (real + area) + _FREE_PADDING:
            groups.append([])
            widest, real = int(keys[entry]), 0
        groups[-1].append(entry)
        longest, real = widest, real + area
    return [np.array(g) for g in groups]


def _group(members: Ints, starts: Ints, extend: Ints, device: torch.device) -> AttentionGroup:
    """Return a group of `members`. Its tokens are a slice if adjacent and equally long, else padded indices."""
    queries = int(extend[members].max())
    first = starts[members]
    if (extend[members] == queries).all() and (np.diff(first) == queries).all():
        return AttentionGroup(len(members), queries, slice(int(first[0]), int(first[0]) + len(members) * queries))
    offset = np.arange(queries)
    real = offset < extend[members, None]
    tokens = np.where(real, first[:, None] + offset, first[:, None])  # padding repeats the entry's first token
    outputs = None if real.all() else to_device(np.flatnonzero(real), device)
    return AttentionGroup(len(members), queries, to_device(tokens.reshape(-1), device), outputs)


def _gathers(cached: Ints, extend: Ints, table: Ints, rows_per_query: int, kv_layer: Tensor) -> list[Gather]:
    """Return the pool reads of a group's entries. On the CPU, each read fits the processor's cache."""
    _, page_size, _, kv_heads, _ = kv_layer.shape
    n, queries, device = len(cached), int(extend.max()), kv_layer.device
    pages = table[:, : -(-int((cached + extend).max()) // page_size)]
    # In memory a page consists of 2 * kv_heads slices.
    slices = to_device((pages[:, None] * (2 * kv_heads) + np.arange(2 * kv_heads)[:, None]).reshape(-1), device)
    # Query i of an entry attends to its first cached + i + 1 keys.
    seen = to_device(cached + 1, device).view(n, 1, 1, 1, 1) + torch.arange(queries, device=device).view(-1, 1, 1)
    hidden = torch.arange(pages.shape[1] * page_size, device=device) >= seen
    mask = torch.zeros(hidden.shape, dtype=kv_layer.dtype, device=device).masked_fill_(hidden, -torch.inf)
    mask = mask.expand(-1, -1, -1, rows_per_query, -1).reshape(n, 1, queries * rows_per_query, -1)
    at_once = n
    if device.type == "cpu":
        bytes_per_entry = pages.shape[1] * kv_layer[0].nbytes
        at_once = max(1, _GATHERED_BYTES // bytes_per_entry)
    cuts = torch.split(slices.view(n, -1), at_once), torch.split(mask, at_once)
    return [Gather(part.reshape(-1), part_mask) for part, part_mask in zip(*cuts, strict=True)]
