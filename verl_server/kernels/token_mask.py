"""Masks of allowed tokens: logits of forbidden tokens become -inf, in place.

A mask is a row of int32 words: bit t % 32 of word t // 32 is set if token t is allowed. On CUDA a Triton kernel writes
the forbidden logits and reads no logit. On the CPU, and without Triton, the bits are expanded.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def apply(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf.

    `logits` [n, vocab] of any floating dtype; the elements of a row are contiguous. `rows` int64 [m] are the rows with
    a mask, each once. `words` int32 [m, ceil(vocab / 32)] are their masks. All are on one device.
    """
    if not logits.is_cpu and _HAS_TRITON:
        from verl_server.kernels.token_mask_triton import apply as apply_on_device

        apply_on_device(logits, rows, words)
    else:
        apply_reference(logits, rows, words)


def apply_reference(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Compute `apply` with NumPy or PyTorch."""
    vocab = logits.shape[1]
    if logits.is_cpu:  # a row at a time, which stays in the cache
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
        forbidden = torch.from_numpy(bits) == 0
        for place, row in enumerate(rows.tolist()):
            logits[row].masked_fill_(forbidden[place], -torch.inf)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    forbidden = (words.unsqueeze(2) >> shifts & 1).flatten(1)[:, :vocab] == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def compile_kernel(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile or load the kernel of `apply` on CUDA, so that no step waits for it."""
    logits = torch.zeros(1, vocab, dtype=dtype, device=device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    apply(logits, rows, torch.zeros(1, -(-vocab // 32), dtype=torch.int32, device=device))
