"""`CpuKernels`: the compiled operators as functions of tensors.

`worker.kernel_choice` makes one if there is a C++ compiler; `models.ops` and `models.cpu_attention` call it. Every
tensor is float32 on the CPU, and contiguous unless a docstring permits otherwise. Calls release the interpreter's lock,
and use as many threads as torch did when the `CpuKernels` was made.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from verl_server.kernels import draw
from verl_server.kernels.cpu.library import load_library

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
"""Values of head_dim for which attention is compiled."""

LANES = 16
"""Largest number of floats in a vector register of any processor. Scratch memory is padded to a multiple of it."""

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class AttentionArgs(ctypes.Structure):
    """`struct Attention` of attention.cpp, which describes the fields."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "q_weight", "k_weight", "pool", "out", "scores", "cosines", "sines")),
        *((name, _POINTER) for name in ("positions", "slots", "rows", "table")),
        *((name, ctypes.c_int64) for name in ("columns", "tokens", "decodes")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "page_size", "threads", "stride")),
        ("eps", ctypes.c_float),
    )


class CpuKernels:
    """The compiled operators for the processor `arch`, a value of the compiler's option `-march`.

    The constructor raises `KernelsUnavailableError` if they cannot be compiled.
    """

    def __init__(self, arch: str = "native") -> None:
        self.library = load_library(arch)
        library = self.library.code
        self._linear, self._rms_norm, self._silu_mul = library.linear, library.rms_norm, library.silu_mul
        self._attend, self._choose = library.attend, library.choose
        self._linear.argtypes = [_POINTER] * 5 + [_LONG] * 4
        self._rms_norm.argtypes = [*[_POINTER] * 3, ctypes.c_float, _POINTER, *[_LONG] * 3]
        self._silu_mul.argtypes = [_POINTER] * 2 + [_LONG] * 3
        self._choose.argtypes = [_POINTER] * 7 + [_LONG] * 4
        self._attend.argtypes = [_POINTER]
        self._attend.restype = ctypes.c_bool
        self.threads = torch.get_num_threads()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [rows, in] @ weight [out, in].T + bias [out] or 0. A row's result does not depend on other rows."""
        rows, size = x.shape
        x, out = x.contiguous(), x.new_empty(rows, weight.shape[0])
        columns = x.new_empty(-(-rows // LANES) * LANES, size)
        given = (x, weight, bias, out, columns)
        self._linear(*map(_address, given), rows, weight.shape[0], size, self.threads)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [..., size] / sqrt(mean(x^2) + eps) * weight [size]."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place and return the `rms_norm` of the sum."""
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert residual is None or residual.is_contiguous()  # the kernel adds to it in place
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        rows = x.numel() // size
        given = (x, residual, weight)
        self._rms_norm(*map(_address, given), eps, out.data_ptr(), rows, size, self.threads)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [rows, size] of gate_up [rows, 2 * size]."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up, out = gate_up.contiguous(), gate_up.new_empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, self.threads)
        return out

    def attend(self, args: AttentionArgs) -> None:
        """Compute attention as attention.cpp describes. Raise ValueError if head_dim is not in `HEAD_DIMS`."""
        if not self._attend(ctypes.addressof(args)):
            raise ValueError(f"Attention is not compiled for head_dim={args.head_dim}, only for {HEAD_DIMS}.")

    def choose(self, logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `kernels.draw.choose`. Only the last dimension of `logits` must be contiguous."""
        logits = logits.float()
        assert logits.stride(1) == 1
        ids, logprobs = keys.new_empty(len(logits)), scales.new_empty(len(logits))
        scratch = scales.new_empty(self.threads, 2, -(-logits.shape[1] // draw.BLOCK))
        given = (logits, scales, greedy, keys, ids, logprobs, scratch)
        self._choose(*map(_address, given), *logits.shape, logits.stride(0), self.threads)
        return ids, logprobs


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
