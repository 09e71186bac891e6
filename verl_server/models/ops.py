"""`Ops`: the decoder's elementwise operators, in plain PyTorch or as fused kernels.

The `ModelRunner` picks one for its device; the layers call it. Both round where transformers rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ONEDNN = bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(frozen=True)
class Ops:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., size], weight [size], eps): statistics in fp32, rounded to x's dtype before the weight is applied."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x, residual, weight, eps): adds x to residual in place, in their dtype, and norms the sum."""
    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up [tokens, 2 * size]): silu(gate) * up [tokens, size]."""
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x [tokens, in], weight [out, in], bias [out] or None): x @ weight.T + bias."""


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True).add_(eps))
    return (x32 * scale).to(x.dtype).mul_(weight)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(residual.add_(x), weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """On the CPU in fp32 torch calls MKL, which leaves AVX-512 unused on AMD; oneDNN's product, on the same plain
    weights, is more than twice as fast there (and no slower on Intel)."""
    if _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu":
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


TORCH_OPS = Ops(_rms_norm, _add_rms_norm, _silu_mul, linear)


def fused_ops(device: torch.device) -> Ops:
    """The Triton kernels for one GPU; ImportError where Triton is missing."""
    from verl_server.kernels.activation import silu_mul
    from verl_server.kernels.gemv import gemv
    from verl_server.kernels.norms import add_rms_norm, rms_norm
    from verl_server.kernels.skinny import SkinnyProduct

    skinny = SkinnyProduct(device)

    def fastest_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] == 1:
            return gemv(x, weight, bias)
        return skinny(x, weight, bias) if skinny.takes(x, weight) else F.linear(x, weight, bias)

    return Ops(rms_norm, add_rms_norm, silu_mul, fastest_linear)
