"""`Ops`: the decoder's norms, activation and matrix product, in plain PyTorch or as fused kernels.

The `ModelRunner` chooses the `Ops` of its device, and the layers call them. All of them round where transformers
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_server.kernels.cpu.kernels import CpuKernels

_ONEDNN = bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CPU = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
CPU_NAME = str(_CPU.get("cpu_name", "unknown processor"))
_INTEL = "Intel" in CPU_NAME

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [tokens, in], weight [out, in], bias [out] or None): x @ weight.T + bias."""


@dataclass(frozen=True)
class Ops:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., size], weight [size], eps) -> RMS norm of x times weight, in x's dtype. Statistics are computed in fp32,
    and the norm is rounded to x's dtype before the product with the weight."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x, residual, weight, eps) -> RMS norm of residual + x, which is stored in residual, times weight."""
    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up [tokens, 2 * size]) -> silu(gate) * up [tokens, size]."""
    linear: Linear
    """(x [tokens, in], weight [out, in], bias [out] or None): x @ weight.T + bias."""


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Return x [..., size] divided by its root mean square: an RMS norm without its weight.

    Statistics are computed in fp32, and the result is rounded to x's dtype.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return unit_rms(x, eps).mul_(weight)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(residual.add_(x), weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias. In fp32 on the CPU, use the faster of two libraries; torch alone always uses MKL.

    Both read the same plain weights. MKL does not use AVX-512 on AMD, where oneDNN takes less than half the time. On
    Intel, MKL is as fast for small weights, and faster below 4 and above 256 rows; from 4 to 16 rows oneDNN takes down
    to half the time of MKL.
    """
    if not _ONEDNN or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if _INTEL and (not 4 <= x.shape[0] <= 256 or weight.numel() <= 2**20):
        return F.linear(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


TORCH_OPS = Ops(_rms_norm, _add_rms_norm, _silu_mul, linear)


def cpu_linears(kernels: CpuKernels) -> dict[str, Linear]:
    """Name -> kernel of the matrix product in fp32 on the CPU. "cpp" is compiled from this package, "torch" is MKL or
    another library of the PyTorch build, and "onednn" is oneDNN if PyTorch has it."""
    linears: dict[str, Linear] = {"cpp": kernels.linear, "torch": F.linear}
    return linears | {"onednn": _onednn_linear} if _ONEDNN else linears


def linear_by_shape(linears: Mapping[str, Linear], names: Mapping[tuple[int, int], Sequence[str]]) -> Linear:
    """Return a matrix product that chooses its kernel by the shape [out, in] of the weight and the number of rows.

    `names[shape][i]` is the name of the kernel for 2^(i-1) + 1 to 2^i rows. The last name is also for more rows.
    """
    table = {shape: [linears[name] for name in row] for shape, row in names.items()}

    def chosen_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        row = table[weight.shape]  # type: ignore[index]  # a Size is a tuple
        return row[min((x.shape[0] - 1).bit_length(), len(row) - 1)](x, weight, bias)

    return chosen_linear


def cpu_ops(kernels: CpuKernels, linear: Linear) -> Ops:
    """Return the compiled operators of the CPU for fp32, with `linear` as the matrix product."""
    return Ops(kernels.rms_norm, kernels.add_rms_norm, kernels.silu_mul, linear)


def cuda_ops(device: torch.device, *, pdl: bool = False) -> Ops:
    """Return the Triton kernels for one GPU. Raise ImportError if Triton is not installed.

    With `pdl`, a kernel begins while the one before it ends (`kernels.dependent`).
    """
    from verl_server.kernels.activation import silu_mul
    from verl_server.kernels.gemv import gemv
    from verl_server.kernels.norms import add_rms_norm, rms_norm
    from verl_server.kernels.skinny import SkinnyProduct

    skinny = SkinnyProduct(device)

    def fastest_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] == 1:
            return gemv(x, weight, bias, pdl=pdl)
        return skinny(x, weight, bias, pdl=pdl) if skinny.is_faster(x, weight) else F.linear(x, weight, bias)

    norm, add_norm, activation = (partial(kernel, pdl=pdl) for kernel in (rms_norm, add_rms_norm, silu_mul))
    return Ops(norm, add_norm, activation, fastest_linear)
