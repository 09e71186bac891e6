"""Paged attention in plain PyTorch, one entry after another: the reference for the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention(
    q: Tensor, kv_layer: Tensor, page_table: Tensor, rows: list[int], cached: list[int], extend: list[int]
) -> Tensor:
    """Return causal attention of each entry's new tokens over the pages of its row, fp32 [tokens, heads * d].

    `q` is [sum(extend), heads, d] and `kv_layer` is [pages, page_size, 2, kv_heads, d]. Entry i has cached[i] +
    extend[i] tokens in the pages of row rows[i].
    """
    outputs = []
    for row, before, length, queries in zip(rows, cached, extend, q.float().split(extend), strict=True):
        kv = kv_layer[page_table[row].long()].flatten(0, 1)[: before + length].float()
        shared = q.shape[1] // kv.shape[2]
        keys, values = (kv[:, i].repeat_interleave(shared, dim=1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(q.shape[2])
        position = torch.arange(before, before + length, device=q.device)
        hidden = torch.arange(before + length, device=q.device) > position[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
    return torch.cat(outputs)
