"""The most likely tokens of each row on CUDA, by the largest logits of blocks that `kernels.sampling.weigh` computed.

Each of the k blocks with the largest maxima holds a token that is at least as likely as any token of another block. So
the k most likely tokens of a row are in k blocks, and the kernel reads no more of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import draw

_BLOCK = tl.constexpr(draw.BLOCK)
_LOWEST = tl.constexpr(draw.LOWEST)

SIZES = (8, 16, 32)
"""Numbers of tokens for which the kernel is compiled.

For other numbers, the kernel of the next larger number is used.
"""
MOST = SIZES[-1]
"""The most tokens that `top` finds. Its work grows with their number."""


def top(
    logits: Tensor,
    scales: Tensor,
    index: Tensor,
    lowest: Tensor | None,
    weights: Tensor,
    norms: Tensor,
    num: int,
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities [n, num] fp32, ids [n, num] int64) of the most likely tokens, the most likely first.

    `logits`, `scales`, `index` and `lowest` are arguments of `kernels.sampling.weigh`, `weights` is its result, and
    `norms` is a result of `kernels.sampling.norms`. `num` is at most `MOST` and at most the number of tokens.
    """
    n, vocab, blocks = len(scales), logits.shape[1], weights.shape[2]
    logprobs = torch.empty((n, num), dtype=torch.float32, device=logits.device)
    ids = torch.empty((n, num), dtype=torch.int64, device=logits.device)
    _top_of_row[(n,)](
        logits,
        scales,
        index,
        lowest,
        weights,
        norms,
        logprobs,
        ids,
        n,
        num,
        logits.stride(0),
        vocab,
        blocks,
        triton.next_power_of_2(blocks),
        next(size for size in SIZES if size >= num),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return logprobs, ids


@triton.jit(do_not_specialize=["rows", "num"])  # type: ignore[untyped-decorator]
def _top_of_row(
    logits: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    lowest: tl.tensor,
    weights: tl.tensor,
    norms: tl.tensor,
    logprobs: tl.tensor,
    ids: tl.tensor,
    rows: tl.tensor,
    num: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = logits + tl.load(index + row) * STRIDE
    block, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    tops = tl.load(weights + row * BLOCKS + block, mask=block < BLOCKS, other=-float("inf"))
    free = block < BLOCKS
    chosen = tl.zeros([SLOTS], tl.int32) + BLOCKS  # a block without tokens
    for place in range(tl.minimum(num, BLOCKS)):
        best = _largest(tops, free, BLOCKS)
        chosen = tl.where(slot == place, best, chosen)
        free = free & (block != best)

    token = chosen[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    values = tl.load(source + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32) * tl.load(scales + row)
    if lowest is not None:
        values = tl.where(values < tl.load(lowest + row), -float("inf"), values)
    values, token = tl.ravel(values), tl.ravel(token)
    free = token < VOCAB
    place = tl.arange(0, SLOTS * _BLOCK)
    largest, rest = tl.load(norms + row), tl.load(norms + rows.to(tl.int64) + row)
    for rank in range(num):
        best = _largest(values, free, SLOTS * _BLOCK)
        value = tl.max(tl.where(place == best, values, -float("inf")), 0)
        tl.store(logprobs + row * num + rank, tl.maximum((value - largest) - rest, _LOWEST, tl.PropagateNan.ALL))
        tl.store(ids + row * num + rank, tl.sum(tl.where(place == best, token, 0), 0).to(tl.int64))
        free = free & (place != best)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(values: tl.tensor, free: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return the index of the largest value that was not taken yet. Values of -inf are taken last."""
    score = tl.where(free, tl.maximum(values, _LOWEST), -float("inf"))
    return tl.minimum(tl.argmax(score, 0), COUNT - 1)
