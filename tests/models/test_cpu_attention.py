"""The CPU's attention kernel agrees with plain PyTorch on the same pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_server.kernels.cpu.kernels import HEAD_DIMS, CpuKernels
from verl_server.kernels.device_arrays import token_positions
from verl_server.models.attention import plan_attention
from verl_server.models.cpu_attention import CpuAttention
from verl_server.models.layers import RMSNorm, RotaryEmbedding
from verl_server.worker.kv_cache import Placement

ROWS, COLUMNS = 9, 12
DECODES = np.array([9, 0, 6, 40])
"""Cached tokens of the entries that decode: none, a few, several pages."""
CHUNKS = [(3, 5), (0, 6), (4, 1), (0, 1)]
"""(cached, new) tokens of the entries after them. An entry with one new token is no decode there."""


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm(size: int, seed: int) -> RMSNorm:
    module = RMSNorm(size, 1e-6)
    module.weight.data = values(size, seed=seed)
    return module


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "page", "normed"),
    [(size, 4, 2, 16, True) for size in HEAD_DIMS]
    + [(16, 3, 1, 4, False), (32, 7, 7, 5, True), (64, 10, 2, 24, False)],
)
@pytest.mark.parametrize("parts", ["decodes", "chunks", "both"])
def test_it_gives_what_pytorch_gives(
    cpu_kernels: CpuKernels, parts: str, head_dim: int, heads: int, kv_heads: int, page: int, normed: bool
) -> None:
    """The outputs agree, and so do the keys and values in the pool."""
    decodes = DECODES if parts != "chunks" else DECODES[:0]
    chunks = np.array(CHUNKS if parts != "decodes" else []).reshape(-1, 2).astype(np.int64)
    cached = np.concatenate([decodes, chunks[:, 0]])
    extend = np.concatenate([np.ones_like(decodes), chunks[:, 1]])
    table = np.random.default_rng(0).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    rows = np.random.default_rng(1).permutation(ROWS)[: len(cached)]
    positions, row_of = token_positions(cached, extend), np.repeat(rows, extend)
    slots = table[row_of, positions // page] * page + positions % page
    ids = np.zeros_like(positions)
    placement = Placement(rows, cached, extend, ids, positions, slots, len(decodes))

    pools = [values(table.size + 1, 2, kv_heads, page, head_dim, seed=3).permute(0, 3, 1, 2, 4) for _ in range(2)]
    module = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    module.q_norm, module.k_norm = (norm(head_dim, 4), norm(head_dim, 5)) if normed else (None, None)
    rotary = RotaryEmbedding(head_dim, 64, {"rope_theta": 1e4, "rope_type": "default"}, torch.device("cpu"))
    qkv = values(len(positions), (heads + 2 * kv_heads) * head_dim, seed=6)

    def trimmed(rows: Any, lens: Any) -> Any:
        pages = -(-lens // page)
        return np.where(np.arange(pages.max()) < pages[:, None], table[rows, : pages.max()], table.size)

    kv = cast(Any, SimpleNamespace(layers=pools, page_table=table, kv_heads=kv_heads, page_size=page))
    kv.trimmed_table = trimmed
    step = CpuAttention(cpu_kernels, rotary, kv, heads).plan(placement)
    got = step.attend(qkv.clone(), module, pools[0])
    angles = rotary.at(torch.from_numpy(positions))
    plan = plan_attention(cached, extend, slots, trimmed(rows, cached + extend), heads, pools[1], angles)
    expected = plan.attend(qkv.clone(), module, pools[1])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pools[0], pools[1], atol=1e-5, rtol=1e-5)
