"""Attention over the paged KV pool in plain PyTorch: planned once a step, then run by every layer.

`StepRunner` builds an `AttentionPlan` per step from lengths and the page table; each decoder layer calls its
`attend`. Entries of similar size are packed into padded groups. Prompts without cached prefix attend to
their own new tokens; everything else (decode, later chunks, prefix hits) gathers its pages. This is what runs on
the CPU, and the fallback on CUDA (`paged_attention` has kernels for it, and the same interface).

A KV layer is [pages, page_size, 2 (k, v), kv_heads, head_dim]. The last page is never written: page lists are
padded with it. Masked positions still enter `0 * v`, so whatever they hold must be finite, which is why
`ModelRunner` zeroes a page when it is handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_server.models.layers import RMSNorm, rotate

Ints = npt.NDArray[np.int64]

_FREE_PADDING = 4096
"""Query-key pairs of padding that cost less than one more group."""


@dataclass
class AttentionGroup:
    """Some entries of the step, padded to `queries` new tokens each."""

    entries: int
    queries: int
    tokens: slice | Tensor
    """Where the group's tokens are in the step: a run of entries * queries, or an index of that many."""
    outputs: Tensor | None = None
    """Positions in the flattened [entries * queries] that are real tokens; None: all of them."""
    pages: Tensor | None = None
    """[entries * pages per entry] of the KV pool; None: fresh prompts, attend to the step's own keys."""
    mask: Tensor | None = None
    """[entries, 1, queries, keys], or with queries * heads per kv head if `folded`; with `pages` only."""
    folded: bool = False
    """Whether the query heads that share a KV head become further query rows, so that keys are not expanded."""


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
    slots: Tensor
    """[tokens] where each new token's keys and values go, in the flattened pool."""
    groups: list[AttentionGroup]
    cos: Tensor
    sin: Tensor
    """[tokens, 1, head_dim], of the tokens' positions; see `RotaryEmbedding`."""

    def attend(self, qkv: Tensor, heads: Heads, kv_layer: Tensor) -> Tensor:
        states = norm_and_rotate(qkv, heads, self.cos, self.sin)
        kv = states[:, heads.num_heads :].view(qkv.shape[0], 2, heads.num_kv_heads, heads.head_dim)
        return attend(states[:, : heads.num_heads], kv, kv_layer, self)


def norm_and_rotate(qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads + 2 * kv_heads, head_dim]: `qkv` itself, with queries and keys normed and rotated in place."""
    states = qkv.view(qkv.shape[0], -1, heads.head_dim)
    qk = states[:, : heads.num_heads + heads.num_kv_heads]
    normed = qk
    if heads.q_norm is not None and heads.k_norm is not None:
        normed = torch.cat([heads.q_norm(qk[:, : heads.num_heads]), heads.k_norm(qk[:, heads.num_heads :])], dim=1)
    qk.copy_(rotate(normed, cos, sin))  # back beside v: keys and values go to the pool in one copy
    return states


def plan_attention(
    cached: Ints,
    extend: Ints,
    slots: Ints,
    table: Ints,
    page_size: int,
    group_heads: int,
    rotary: tuple[Tensor, Tensor],
    device: torch.device,
) -> AttentionPlan:
    """Decide groups and build every index tensor. `table` is [entries, pages], padded with the padding page."""
    starts = np.concatenate(([0], np.cumsum(extend)))
    fresh = (cached == 0) & (extend > 1)
    groups = []
    for kind in (True, False):
        for members in _pack(np.flatnonzero(fresh == kind), extend, cached + extend):
            group = _group(members, starts, extend, device)
            if not kind:
                _add_pages(group, members, cached, extend, table, page_size, group_heads, device)
            groups.append(group)
    return AttentionPlan(to_device(slots, device), groups, *rotary)


def attend(q: Tensor, kv: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
    """Store kv [tokens, 2, kv_heads, d] into the pool; return q [tokens, heads, d] attended, [tokens, heads * d]."""
    tokens, heads, head_dim = q.shape
    kv_layer.view(-1, *kv.shape[1:]).index_copy_(0, plan.slots, kv)
    if len(plan.groups) == 1 and isinstance(plan.groups[0].tokens, slice):
        return _attend_group(q, kv, kv_layer, plan.groups[0]).reshape(tokens, heads * head_dim)
    out = torch.empty_like(q)
    for group in plan.groups:
        part = _attend_group(q, kv, kv_layer, group).reshape(-1, heads, head_dim)
        if isinstance(group.tokens, slice):
            out[group.tokens] = part
        elif group.outputs is None:
            out.index_copy_(0, group.tokens, part)
        else:
            out.index_copy_(0, group.tokens[group.outputs], part[group.outputs])
    return out.view(tokens, heads * head_dim)


def _attend_group(q: Tensor, kv: Tensor, kv_layer: Tensor, group: AttentionGroup) -> Tensor:
    n, length = group.entries, group.queries
    heads, head_dim = q.shape[1:]
    q = q[group.tokens].view(n, length, heads, head_dim)
    if group.pages is None:
        # Padding is at the end, where the causal mask keeps it from every real query.
        kv = kv[group.tokens].view(n, length, *kv.shape[1:])
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    kv_heads = kv_layer.shape[3]
    gathered = kv_layer.view(kv_layer.shape[0], -1).index_select(0, group.pages)
    gathered = gathered.view(n, -1, 2, kv_heads, head_dim)
    k, v = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
    if not group.folded:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=group.mask, enable_gqa=True)
        return out.transpose(1, 2)
    shared = heads // kv_heads
    rows = q.view(n, length, kv_heads, shared, head_dim).transpose(1, 2).reshape(n, kv_heads, length * shared, head_dim)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=group.mask)
    return out.view(n, kv_heads, length, shared, head_dim).transpose(1, 2)


def token_positions(cached: Ints, extend: Ints) -> Ints:
    """Position in its sequence of every new token, concatenated."""
    offsets = np.cumsum(extend) - extend
    return np.arange(int(extend.sum())) - np.repeat(offsets - cached, extend)


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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


def _add_pages(
    group: AttentionGroup,
    members: Ints,
    cached: Ints,
    extend: Ints,
    table: Ints,
    page_size: int,
    group_heads: int,
    device: torch.device,
) -> None:
    lens = cached[members] + extend[members]
    num_pages = int(-(-lens.max() // page_size))
    group.pages = to_device(np.ascontiguousarray(table[members, :num_pages]).reshape(-1), device)
    # Query i of an entry sees cached + i + 1 keys.
    seen = to_device(cached[members] + 1, device).view(-1, 1, 1, 1, 1)
    seen = seen + torch.arange(group.queries, device=device).view(1, 1, -1, 1, 1)
    keys = torch.arange(num_pages * page_size, device=device)
    # With a mask, CUDA's fast kernels take no grouped heads. On the CPU folding pays from three heads on.
    group.folded = device.type == "cuda" or group_heads > 2
    mask = (keys < seen).expand(-1, -1, -1, group_heads if group.folded else 1, -1)
    group.mask = mask.reshape(group.entries, 1, -1, len(keys))
