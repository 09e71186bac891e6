"""The masks of `kernels.token_mask` on CUDA: one program for each row and tile of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Number of tokens of a program."""


def apply(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Compute `token_mask.apply`."""
    assert logits.stride(1) == 1 and words.stride(1) == 1
    vocab = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab, _TILE))
    _mask_tile[grid](logits, rows, words, logits.stride(0), words.stride(0), vocab, _TILE, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _mask_tile(
    logits: tl.tensor,
    rows: tl.tensor,
    words: tl.tensor,
    logits_stride: tl.tensor,
    words_stride: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab
    word = tl.load(words + place * words_stride + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, -float("inf"), mask=inside & forbidden)
