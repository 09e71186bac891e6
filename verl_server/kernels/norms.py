"""RMS norm, alone or with the addition to the residual before it: the norms of `models.ops` in one pass.

One program computes one row. At decode a launch takes the time of one row, at prefill it runs at memory bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import dependent


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Return the norm of each row of x [T, hidden], contiguous, times `weight` [hidden] of the same dtype.

    Return a new tensor of x's shape and dtype. `pdl`: see `dependent`; no kernel that may still run writes `weight`.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    launch = dependent.options(pdl)
    _norm_row[(x.shape[0],)](x, weight, out, eps, size, block, num_warps=_warps(block), **launch)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Add x to `residual` in place, rounded to the dtype of both. Return the norm of the sum.

    Shapes and `pdl` are those of `rms_norm`.
    """
    assert x.is_contiguous() and residual.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    launch = dependent.options(pdl)
    _add_norm_row[(x.shape[0],)](x, residual, weight, out, eps, size, block, num_warps=_warps(block), **launch)
    return out


def _warps(block: int) -> int:
    """Warps for rows of `block` elements: eight elements for each thread, which are 16-byte loads of 16-bit types."""
    return max(1, min(block // 256, 16))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_row(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    dependent.let_next_begin(DEPENDENT)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scale = tl.load(weight + column, mask=inside, other=0.0)
    dependent.wait(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
) -> None:
    dependent.let_next_begin(DEPENDENT)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scale = tl.load(weight + column, mask=inside, other=0.0)
    dependent.wait(DEPENDENT)
    values = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = values.to(residual.dtype.element_ty)
    tl.store(residual + at, total, mask=inside)
    tl.store(out + at, normalized(total.to(tl.float32), scale, EPS, SIZE), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def normalized(values: tl.tensor, weight: tl.tensor, EPS: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Return the norm of one fp32 row, zero beyond SIZE; it is rounded to the weight's dtype, then multiplied."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + EPS)
    rounded = (values * scale).to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype)
