"""The draw of `kernels.draw` on CUDA: one pass over the logits of the output head, then one program for each row.

The first kernel stores the largest logit and the sum of exponentials of each block. The second kernel computes the
normalizer from them and draws, so the log-probability of a sampled token needs no further pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import draw

_BLOCK = tl.constexpr(draw.BLOCK)
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(draw.GOLDEN), tl.constexpr(draw.MIX_1), tl.constexpr(draw.MIX_2)
_LOWEST = tl.constexpr(draw.LOWEST)

_TILE_BLOCKS = 64
"""Number of blocks that a program of the first kernel reads."""


def choose(logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The same as `draw.choose`. The elements of a row of `logits` must be contiguous; rows may have any stride."""
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocab, draw.BLOCK)
    tops = torch.empty((2, n, blocks), dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    _weigh_blocks[(n, triton.cdiv(blocks, _TILE_BLOCKS))](
        logits, scales, tops, n, stride, vocab, blocks, _TILE_BLOCKS, num_warps=8
    )
    _draw_row[(n,)](
        logits,
        scales,
        greedy,
        keys,
        tops,
        ids,
        logprobs,
        n,
        stride,
        vocab,
        blocks,
        triton.next_power_of_2(blocks),
        num_warps=8,
    )
    return ids, logprobs


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _weigh_blocks(
    logits: tl.tensor,
    scales: tl.tensor,
    tops: tl.tensor,
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile) stores the largest logit of each block in tops[0, row, block], and the sum of exponentials
    relative to it in tops[1, row, block]. They are -inf and 0 for a block in which no token can be drawn."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    values = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=-float("inf"))
    values = values.to(tl.float32) * tl.load(scales + row)
    top = tl.max(values, 1)
    total = tl.sum(tl.exp(values - tl.where(top == -float("inf"), 0.0, top)[:, None]), 1)
    target = tops + row * BLOCKS + block
    tl.store(target, top, mask=block < BLOCKS)
    tl.store(target + rows.to(tl.int64) * BLOCKS, total, mask=block < BLOCKS)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _draw_row(
    logits: tl.tensor,
    scales: tl.tensor,
    greedy: tl.tensor,
    keys: tl.tensor,
    tops: tl.tensor,
    ids: tl.tensor,
    logprobs: tl.tensor,
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    scale, key, takes_largest = tl.load(scales + row), tl.load(keys + row), tl.load(greedy + row)
    block = tl.arange(0, WIDTH)
    source = tops + row * BLOCKS + block
    largest = tl.load(source, mask=block < BLOCKS, other=-float("inf"))
    total = tl.load(source + rows.to(tl.int64) * BLOCKS, mask=block < BLOCKS, other=0.0)
    top = tl.max(largest, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    norm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))

    noisy = (largest + tl.log(total)).to(tl.float64) + _gumbel(key, -1 - block)
    score = tl.where(takes_largest, largest.to(tl.float64), noisy)
    chosen = tl.minimum(tl.argmax(score, 0), BLOCKS - 1)  # with NaN scores, argmax may return any number
    token = chosen * _BLOCK + tl.arange(0, _BLOCK)
    value = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32) * scale
    score = value.to(tl.float64) + tl.where(takes_largest, 0.0, _gumbel(key, token + 1))
    result = tl.minimum(chosen * _BLOCK + tl.argmax(score, 0), VOCAB - 1)

    logprob = tl.load(logits + row * STRIDE + result).to(tl.float32) * scale - norm
    tl.store(ids + row, result.to(tl.int64))
    tl.store(logprobs + row, tl.where(tl.abs(norm) < float("inf"), tl.maximum(logprob, _LOWEST), float("nan")))


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel(key: tl.tensor, counter: tl.tensor) -> tl.tensor:
    """The same as `draw.gumbel`."""
    words = key + counter.to(tl.int64) * _GOLDEN
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _MIX_1
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    words = words ^ ((words >> 31) & 0x1FFFFFFFF)
    uniform = (((words >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))
