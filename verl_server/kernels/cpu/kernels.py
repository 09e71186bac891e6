"""`CpuKernels`: the compiled operators as functions of tensors.

`ModelRunner` makes one where a C++ compiler is there; `models.ops` and `models.cpu_attention` call it. Every tensor is
contiguous float32 on the CPU. Calls release Python's lock and use as many threads as torch does.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from verl_server.kernels.cpu.library import load_library

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
"""That attention is compiled for."""

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class AttentionArgs(ctypes.Structure):
    """`struct Attention` of attention.cpp, where its fields are described."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "q_weight", "k_weight", "pool", "out", "cosines", "sines")),
        *((name, _POINTER) for name in ("positions", "slots", "rows", "table")),
        *((name, ctypes.c_int64) for name in ("columns", "tokens", "decodes")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "page_size", "threads")),
        ("eps", ctypes.c_float),
    )


class CpuKernels:
    """Raises `KernelsUnavailableError` where they cannot be compiled."""

    def __init__(self) -> None:
        library = load_library()
        self._linear, self._rms_norm, self._silu_mul = library.linear, library.rms_norm, library.silu_mul
        self._attend, self._choose = library.attend, library.choose
        self._linear.argtypes = [_POINTER] * 4 + [_LONG] * 4
        self._rms_norm.argtypes = [*[_POINTER] * 3, ctypes.c_float, _POINTER, *[_LONG] * 3]
        self._silu_mul.argtypes = [_POINTER] * 2 + [_LONG] * 3
        self._choose.argtypes = [_POINTER] * 6 + [_LONG] * 4
        self._attend.argtypes = [_POINTER]
        self._attend.restype = ctypes.c_bool
        self.threads = torch.get_num_threads()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in] @ weight [out, in].T + bias [out] or None; for few rows, see linear.cpp."""
        rows, size = x.shape
        x, out = x.contiguous(), x.new_empty(rows, weight.shape[0])
        offset = None if bias is None else bias.data_ptr()
        self._linear(x.data_ptr(), weight.data_ptr(), offset, out.data_ptr(), rows, weight.shape[0], size, self.threads)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `x` to `residual` in place and norms the sum."""
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        rest = None if residual is None else residual.data_ptr()
        self._rms_norm(
            x.data_ptr(), rest, weight.data_ptr(), eps, out.data_ptr(), x.numel() // size, size, self.threads
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, self.threads)
        return out

    def attend(self, args: AttentionArgs) -> None:
        """Norms and rotates, stores keys and values, and attends from decoded tokens. See attention.cpp."""
        if not self._attend(ctypes.addressof(args)):
            raise ValueError(f"head_dim={args.head_dim} is not compiled; there are {HEAD_DIMS}.")

    def choose(self, logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """`runtime.draw.choose`. Rows of `logits` may lie apart, their elements not."""
        logits = logits.float()
        assert logits.stride(1) == 1
        ids, logprobs = keys.new_empty(len(logits)), scales.new_empty(len(logits))
        given = (t.data_ptr() for t in (logits, scales, greedy, keys, ids, logprobs))
        self._choose(*given, *logits.shape, logits.stride(0), self.threads)
        return ids, logprobs
