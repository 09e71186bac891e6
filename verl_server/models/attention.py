"""Attention over the paged KV pool in plain PyTorch: planned once a step, then run by every layer.

`ModelRunner` builds an `AttentionPlan` per step from lengths and the page table; each decoder layer calls its
`attend`. Entries of similar size are packed into padded groups. Prompts without cached prefix attend to
their own new tokens; everything else (decode, later chunks, prefix hits) gathers its pages. This is the fallback on
every device (`paged_attention` and `cpu_attention` have kernels, and the same interface; the latter uses its groups).

A KV layer is [pages, page_size, 2 (k, v), kv_heads, head_dim], in memory [pages, 2, kv_heads, page_size, head_dim]:
a page is gathered by slices, each one head's keys or values. The last page is never written: page lists are padded
with it. Masked positions still enter `0 * v`, so whatever they hold must be finite, which is why `KVCache` zeroes a
page when it is handed out.
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
"""Query-key pairs of padding that cost less than one more group."""

_GATHERED_BYTES = 2**23
"""Keys and values gathered at once on the CPU: still in its cache when they are attended to, and from a block that the
C library keeps. (Those above 32 MiB are mapped anew each time, and filled with zeros first: twice the step's time.)"""


@dataclass(slots=True)
class Placement:
    """One step's indices, on the host. Entries in batch order: first those that decode, then prefill chunks."""

    rows: Ints
    """[entries] rows of the page table."""
    cached: Ints
    """[entries] tokens whose keys are in the pool already."""
    extend: Ints
    """[entries] new tokens."""
    ids: Ints
    """[tokens] token ids; -1: what the entry's row sampled last, known to the device only."""
    positions: Ints
    """[tokens] position of each new token in its sequence."""
    slots: Ints
    """[tokens] where its key and value go: page * page_size + offset."""
    num_decodes: int
    """Leading entries with one new token."""

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
    """Some entries of the step, padded to `queries` new tokens each."""

    entries: int
    queries: int
    tokens: slice | Tensor
    """Where the group's tokens are in the step: a run of entries * queries, or an index of that many."""
    outputs: Tensor | None = None
    """Positions in the flattened [entries * queries] that are real tokens; None: all of them."""
    gathers: list[Gather] | None = None
    """Its entries in order; None: fresh prompts, attend to the step's own keys."""
    folded: bool = False
    """Whether the query heads that share a KV head become further query rows, so that keys are not expanded."""


@dataclass
class Gather:
    """Some entries of a group whose keys and values are taken from the pool at once."""

    slices: Tensor
    """[entries * 2 (k, v) * kv_heads * pages per entry] of the pool, in this order."""
    mask: Tensor
    """[entries, 1, queries, keys] to add to the scores, or with queries * heads per kv head if `folded`."""


class Heads(Protocol):
    """What attention needs of a layer's `Attention` module."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None


class AttentionStep(Protocol):
    """How a step attends, in every layer: `AttentionPlan`, or `paged_attention.PagedStep`."""

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        """qkv [tokens, (heads + 2 * kv_heads) * head_dim], as projected; may be overwritten. Norms and rotates
        queries and keys, stores keys and values into `kv_layer`, returns [tokens, heads * head_dim]."""
        ...


@dataclass
class AttentionPlan:
    slots: tuple[Tensor, Tensor]
    """Page and offset [tokens] where each new token's keys and values go."""
    groups: list[AttentionGroup]
    cos: Tensor
    sin: Tensor
    """[tokens, 1, head_dim], of the tokens' positions; see `RotaryEmbedding`."""

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        states = norm_and_rotate(qkv, heads, self.cos, self.sin)
        q, kv = split_heads(states, heads)
        kv_layer.index_put_(self.slots, kv)
        return attend_groups(q, kv, kv_layer, self.groups)


def split_heads(states: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Views of states [tokens, heads + 2 * kv_heads, d]: q [tokens, heads, d] and kv [tokens, 2, kv_heads, d]."""
    kv = states[:, heads.num_heads :].view(states.shape[0], 2, heads.num_kv_heads, heads.head_dim)
    return states[:, : heads.num_heads], kv


def norm_and_rotate(qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads + 2 * kv_heads, head_dim]: `qkv` itself, with queries and keys normed and rotated in place."""
    states = qkv.view(qkv.shape[0], -1, heads.head_dim)
    qk = states[:, : heads.num_heads + heads.num_kv_heads]
    normed = qk
    if heads.q_norm is not None and heads.k_norm is not None:
        normed = unit_rms(qk, heads.q_norm.eps)
        normed[:, : heads.num_heads].mul_(heads.q_norm.weight)
        normed[:, heads.num_heads :].mul_(heads.k_norm.weight)
    qk.copy_(rotate(normed, cos, sin))  # back beside v: keys and values go to the pool in one copy
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
    """Decide groups and build every index tensor.

    `table` is [entries, pages], padded with the padding page; `kv_layer` any layer of the pool, for its shape alone.
    """
    pages, offsets = to_device(np.stack(np.divmod(slots, kv_layer.shape[1])), kv_layer.device)
    return AttentionPlan((pages, offsets), plan_groups(cached, extend, table, num_heads, kv_layer), *rotary)


def plan_groups(cached: Ints, extend: Ints, table: Ints, num_heads: int, kv_layer: Tensor) -> list[AttentionGroup]:
    """The entries of a plan, see `plan_attention`, by what is attended to at once."""
    device = kv_layer.device
    starts = np.concatenate(([0], np.cumsum(extend)))
    fresh = (cached == 0) & (extend > 1)
    groups = []
    for kind in (True, False):
        for members in _pack(np.flatnonzero(fresh == kind), extend, cached + extend):
            group = _group(members, starts, extend, device)
            if not kind:
                # With a mask, CUDA's fast kernels take no grouped heads.
                group.folded = device.type == "cuda" or group.queries == 1
                rows = num_heads // kv_layer.shape[3] if group.folded else 1
                group.gathers = _gathers(cached[members], extend[members], table[members], rows, kv_layer)
            groups.append(group)
    return groups


def attend_groups(q: Tensor, kv: Tensor, kv_layer: Tensor, groups: list[AttentionGroup]) -> Tensor:
    """q [tokens, heads, d] attended, [tokens, heads * d]; kv [tokens, 2, kv_heads, d] is in the pool already."""
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
    """[entries, queries, heads in order, head_dim]; the heads may still be apart by KV head."""
    n, length = group.entries, group.queries
    q = q[group.tokens].view(n, length, *q.shape[1:])
    if group.gathers is not None:
        return _attend_gathered(q, kv_layer, group.gathers, group.folded)
    # Padding is at the end, where the causal mask keeps it from every real query.
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
    """Cut entries (largest first) into groups whose padding is cheap; batch order where all are alike."""
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
    """The group's tokens: a slice if it is a run of equally long entries, else padded indices."""
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
    """What the entries of a group gather, few enough at a time to stay in the CPU's cache."""
    _, page_size, _, kv_heads, _ = kv_layer.shape
    n, queries, device = len(cached), int(extend.max()), kv_layer.device
    pages = table[:, : -(-int((cached + extend).max()) // page_size)]
    # In memory a page is 2 * kv_heads slices.
    slices = to_device((pages[:, None] * (2 * kv_heads) + np.arange(2 * kv_heads)[:, None]).reshape(-1), device)
    # Query i of an entry sees cached + i + 1 keys.
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
