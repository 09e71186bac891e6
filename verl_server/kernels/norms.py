"""RMS norm, alone or with the residual addition before it. What `models.layers.RMSNorm` computes, in one pass.

One program a row: at decode a launch lasts as long as one row does, at prefill it runs at memory speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden], contiguous -> the same shape and dtype. `weight` [hidden], of the same dtype."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _norm_row[(x.shape[0],)](x, weight, out, eps, size, block, num_warps=_warps(block))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual` += x, in place and rounded to the dtype of both; returns its norm. Shapes as in `rms_norm`."""
    assert x.is_contiguous() and residual.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _add_norm_row[(x.shape[0],)](x, residual, weight, out, eps, size, block, num_warps=_warps(block))
    return out


def _warps(block: int) -> int:
    """Eight elements a thread: 16-byte loads of two-byte types."""
    return max(1, min(block // 256, 16))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_row(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scale = tl.load(weight + column, mask=inside, other=0.0)
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normalized(values, scale, EPS, SIZE), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm_row(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scale = tl.load(weight + column, mask=inside, other=0.0)
    values = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = values.to(residual.dtype.element_ty)
    tl.store(residual + at, total, mask=inside)
    tl.store(out + at, normalized(total.to(tl.float32), scale, EPS, SIZE), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def normalized(values: tl.tensor, weight: tl.tensor, EPS: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """The norm of one fp32 row, zeros beyond SIZE; rounded to the weight's dtype before the weight is applied."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + EPS)
    rounded = (values * scale).to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype)
