"""The product of a matrix and one vector at memory bandwidth: the main work of a decode step of a single sequence.

Every program computes a few output elements, and reads their rows of the weight block by block. The general product of
PyTorch pads one row to a tile, or splits the sum and adds the halves in another kernel. This one reads each weight once
and writes each output once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import dependent


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """x [1, in] @ weight.T + bias [out], summed in fp32. `weight` [out, in] is contiguous. Return [1, out].

    `pdl`: see `dependent`; no kernel that may still run writes `weight`.
    """
    rows, size = weight.shape
    assert x.shape == (1, size) and x.is_contiguous() and weight.is_contiguous()
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    block_rows, block, warps = _tile(rows, size)
    _gemv[(triton.cdiv(rows, block_rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        size,
        bias is not None,
        block_rows,
        block,
        num_warps=warps,
        **dependent.options(pdl),
    )
    return out


def _tile(rows: int, size: int) -> tuple[int, int, int]:
    """(rows per program, columns per block, warps), measured on one H200 for Qwen3-0.6B and 8B."""
    block = min(2048, size & -size)  # the largest power of two that divides `size`
    if block < 256:
        block = min(1024, triton.next_power_of_2(size))
    return (1 if block >= 2048 else 2), block, 4


@triton.jit  # type: ignore[untyped-decorator]
def _gemv(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    dependent.let_next_begin(DEPENDENT)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    start = weight + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    inside: tl.constexpr = SIZE % BLOCK == 0 and ROWS % BLOCK_ROWS == 0
    first = _block_of(start, row, column, 0, inside, ROWS, SIZE)
    second = _block_of(start, row, column, BLOCK, inside, ROWS, SIZE) if SIZE > BLOCK else first
    dependent.wait(DEPENDENT)  # the blocks of the weight are on their way
    total = first.to(tl.float32) * _part_of(x, column, 0, inside, SIZE)[None, :]
    for k in tl.static_range(BLOCK, SIZE, BLOCK):
        block = second if k == BLOCK else _block_of(start, row, column, k, inside, ROWS, SIZE)
        total += block.to(tl.float32) * _part_of(x, column, k, inside, SIZE)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + row, mask=row < ROWS, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < ROWS)


@triton.jit  # type: ignore[untyped-decorator]
def _block_of(
    start: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    k: tl.constexpr,
    INSIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Load the weight's columns from k on. INSIDE: no row or column of any program lies beyond the weight."""
    if INSIDE:
        return tl.load(start + k)
    else:
        return tl.load(start + k, mask=(column + k < SIZE)[None, :] & (row < ROWS)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _part_of(x: tl.tensor, column: tl.tensor, k: tl.constexpr, INSIDE: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Load x[k + column] as fp32, 0 beyond SIZE. INSIDE: no column of any program lies beyond SIZE."""
    if INSIDE:
        return tl.load(x + k + column).to(tl.float32)
    else:
        return tl.load(x + k + column, mask=column + k < SIZE, other=0.0).to(tl.float32)
