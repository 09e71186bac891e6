"""Attention over pages in plain PyTorch agrees with attention of one entry at a time without pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_server.kernels.device_arrays import token_positions
from verl_server.models import attention
from verl_server.models.attention import attend_groups, plan_attention

PAGE, HEAD_DIM = 4, 8
CACHED, EXTEND = np.array([9, 0, 6, 3, 0, 4, 8]), np.array([1, 1, 1, 5, 6, 2, 1])
"""Decodes of several lengths, one without cached tokens; chunks on top of cached tokens; a fresh prompt."""


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gathered_bytes", [1, 3000, 2**30])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (6, 1)])
def test_pages_give_what_whole_sequences_give(
    monkeypatch: pytest.MonkeyPatch, gathered_bytes: int, heads: int, kv_heads: int
) -> None:
    """The result depends neither on how many entries are gathered at once, nor on slots beyond an entry's length."""
    monkeypatch.setattr(attention, "_GATHERED_BYTES", gathered_bytes)
    lens, tokens = CACHED + EXTEND, int(EXTEND.sum())
    q, kv = values(tokens, heads, HEAD_DIM, seed=1), values(tokens, 2, kv_heads, HEAD_DIM, seed=2)
    history = values(len(lens), int(lens.max()), 2, kv_heads, HEAD_DIM, seed=3)
    columns = -(-int(lens.max()) // PAGE)
    table = np.random.default_rng(0).permutation(len(lens) * columns).reshape(len(lens), columns)
    pool = torch.full((table.size + 1, 2, kv_heads, PAGE, HEAD_DIM), 7.0).permute(0, 3, 1, 2, 4)
    for entry, length in enumerate(CACHED):
        for at in range(length):
            pool[table[entry, at // PAGE], at % PAGE] = history[entry, at]
    positions, entry_of = token_positions(CACHED, EXTEND), np.repeat(np.arange(len(lens)), EXTEND)
    slots = table[entry_of, positions // PAGE] * PAGE + positions % PAGE

    nowhere = torch.empty(0)
    plan = plan_attention(CACHED, EXTEND, slots, table, heads, pool, (nowhere, nowhere))
    pool.index_put_(plan.slots, kv)
    out = attend_groups(q, kv, pool, plan.groups)

    start = 0
    for entry, (cached, extend) in enumerate(zip(CACHED.tolist(), EXTEND.tolist(), strict=True)):
        new = slice(start, start + extend)
        keys, vals = torch.cat([history[entry, :cached], kv[new]]).transpose(0, 2).unbind(1)
        visible = torch.ones(extend, cached + extend, dtype=torch.bool).tril(cached)
        expected = F.scaled_dot_product_attention(
            q[new].transpose(0, 1), keys, vals, attn_mask=visible, enable_gqa=True
        )
        torch.testing.assert_close(out[new], expected.transpose(0, 1).reshape(extend, -1), atol=1e-5, rtol=1e-5)
        start += extend
