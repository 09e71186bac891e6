"""Head norms, rotary embedding and storing of keys and values in one pass, between qkv projection and attention.

A program computes up to eight heads of one token, so that cos and sin are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import dependent

_MAX_HEADS = 8


def norm_rotate_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Normalize and rotate q and k of T tokens, store k and v in the pool, and return q [T, heads, head_dim].

    `qkv` [T, (heads + 2 * kv_heads) * head_dim] is contiguous. `kv_layer` [pages, page_size, 2, kv_heads, head_dim] has
    the same dtype and any strides, except that the last dimension is dense. `slots` [T] are page * page_size + offset
    of each token. `q_weight` and `k_weight` [head_dim] are both None for models without head norms. `positions` [T]
    index the rows of `cos` and `sin` [max_positions, 1, head_dim] fp32, which are the tables of `RotaryEmbedding`: the
    halves of cos are equal, and the first half of sin is negated. Values are rounded as in `models.layers`: to the
    dtype after the norm, after its weight, and after the rotation, which is computed in fp32.

    `pdl`: see `dependent`; no kernel that may still run writes `cos`, `sin`, `positions` or `slots`.
    """
    page_size, _, kv_heads, head_dim = kv_layer.shape[1:]
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and kv_layer.stride(4) == 1
    q = qkv.new_empty((tokens, heads, head_dim))
    at_once = min(_MAX_HEADS, triton.next_power_of_2(kv_heads))
    half_block = triton.next_power_of_2(head_dim // 2)
    groups = triton.cdiv(heads, at_once) + 2 * triton.cdiv(kv_heads, at_once)
    normed = q_weight is not None and k_weight is not None
    _norm_rotate_store[(tokens, groups)](
        qkv,
        q_weight if normed else qkv,
        k_weight if normed else qkv,
        cos,
        sin,
        positions,
        slots,
        q,
        kv_layer,
        eps if normed else None,
        heads,
        kv_heads,
        head_dim,
        page_size,
        *kv_layer.stride()[:4],
        at_once,
        half_block,
        num_warps=max(1, min(4, at_once * half_block // 256)),
        **dependent.options(pdl),
    )
    return q


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rotate_store(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q: tl.tensor,
    kv_layer: tl.tensor,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    OFFSET_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (token, group). The groups of q come first, then those of k and those of v. EPS is None without norms."""
    dependent.let_next_begin(DEPENDENT)
    q_groups: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    kv_groups: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    kind = tl.where(group < q_groups, 0, tl.where(group < q_groups + kv_groups, 1, 2))
    head = (group - tl.where(kind == 0, 0, q_groups + (kind - 1) * kv_groups)) * AT_ONCE + tl.arange(0, AT_ONCE)
    first_head = tl.where(kind == 0, 0, HEADS + (kind - 1) * KV_HEADS)
    column = tl.arange(0, HALF_BLOCK)
    inside = (head < tl.where(kind == 0, HEADS, KV_HEADS))[:, None] & (column < half)[None, :]
    # Weights, cos and sin are the same for all heads. With these offsets every thread loads its own copy, so that
    # threads need not exchange values.
    every = column[None, :] + tl.zeros_like(head)[:, None]
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + (first_head + head)[:, None] * HEAD_DIM
    rotated = inside & (kind < 2)
    angle = tl.load(positions + token).to(tl.int64) * HEAD_DIM + half + every
    c = tl.load(cos + angle, mask=rotated, other=0.0)
    s = tl.load(sin + angle, mask=rotated, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    dependent.wait(DEPENDENT)
    low = tl.load(source + column[None, :], mask=inside, other=0.0)
    high = tl.load(source + half + column[None, :], mask=inside, other=0.0)
    if kind < 2:
        low32, high32 = low.to(tl.float32), high.to(tl.float32)
        if EPS is not None:
            weight = q_weight if kind == 0 else k_weight
            scale = tl.rsqrt((tl.sum(low32 * low32, 1) + tl.sum(high32 * high32, 1)) / HEAD_DIM + EPS)[:, None]
            low32 = _weighted(low32 * scale, weight + every, inside)
            high32 = _weighted(high32 * scale, weight + half + every, inside)
        low = (low32 * c - high32 * s).to(low.dtype)
        high = (high32 * c + low32 * s).to(high.dtype)
    if kind == 0:
        target = q + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, low, mask=inside)
        tl.store(target + half, high, mask=inside)
    else:
        start = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * OFFSET_STRIDE + (kind - 1) * KV_STRIDE
        target = kv_layer + start + head[:, None] * HEAD_STRIDE + column[None, :]
        tl.store(target, low, mask=inside)
        tl.store(target + half, high, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted(values: tl.tensor, weight: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Round fp32 values to the weight's dtype, multiply by the weight, and round again. Return fp32."""
    factor = tl.load(weight, mask=inside, other=0.0)
    rounded = values.to(factor.dtype).to(tl.float32)
    return (rounded * factor.to(tl.float32)).to(factor.dtype).to(tl.float32)
