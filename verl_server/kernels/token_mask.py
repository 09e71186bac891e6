"""Masks of allowed tokens: logits of forbidden tokens become -inf, in place.

A mask is a row of int32 words: bit t % 32 of word t // 32 is set if token t is allowed. On CUDA a Triton kernel writes
the forbidden logits and reads no logit. On the CPU the bits are expanded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def apply(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf.

    `logits` [n, vocab] of any floating dtype; the elements of a row are contiguous. `rows` int64 [m] are the rows with
    a mask, each once. `words` int32 [m, ceil(vocab / 32)] are their masks. All are on one device.
    """
    if logits.is_cuda:
        from verl_server.kernels.token_mask_triton import apply as apply_on_device

        apply_on_device(logits, rows, words)
    else:
        apply_reference(logits, rows, words)


def apply_reference(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """The same as `apply`, with NumPy and PyTorch on the CPU."""
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits) == 0
    for place, row in enumerate(rows.tolist()):
        logits[row].masked_fill_(forbidden[place], -torch.inf)
