"""The gated activation of the MLP, in one pass over the fused gate and up projections."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import dependent

_BLOCK = 1024


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up [T, I] of `gate_up` [T, 2 * I], contiguous, whose first half of each row is the gate.

    silu is computed in fp32 and rounded to the dtype of `gate_up` before the product, as in `F.silu(gate) * up`.
    `pdl`: see `dependent`.
    """
    assert gate_up.is_contiguous()
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty((gate_up.shape[0], size))
    grid, launch = (gate_up.shape[0], triton.cdiv(size, _BLOCK)), dependent.options(pdl)
    _silu_mul_block[grid](gate_up, out, size, _BLOCK, num_warps=4, **launch)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_block(
    gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
) -> None:
    dependent.let_next_begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, (activated * up).to(out.dtype.element_ty), mask=inside)
