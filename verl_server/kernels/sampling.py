"""The draw of `kernels.draw` on CUDA, and the parts of a softmax that filters and log-probabilities share with it.

`weigh` reads the logits once, and stores the largest logit and the sum of exponentials of each block of 64 tokens. All
else follows from these: `norms` is the normalizer of each row, `draw_rows` chooses a block and then a token, and the
tokens with the largest logits are in the blocks with the largest maxima (`sampling.fused`).

The functions share these arguments. `logits` [rows, vocab] have any float dtype, and the tokens of a row are
contiguous. `scales` [n] fp32 are multiplied with them. `index` [n] int64 names the row of `logits` of each of the n
rows, None: row i is `logits[i]`. `lowest` [n] fp32: a token whose scaled logit is lower cannot be drawn, None: all can.
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

_TARGET_ROWS = 128
"""Number of rows whose targets a program reads."""
_TILE_BLOCKS = 64
"""Number of blocks that a program of the first kernel reads."""


def choose(logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `draw.choose`. The elements of a row of `logits` must be contiguous; rows may have any stride."""
    return draw_rows(logits, scales, greedy, keys, weigh(logits, scales))


def weigh(
    logits: Tensor,
    scales: Tensor,
    index: Tensor | None = None,
    lowest: Tensor | None = None,
    targets: Tensor | None = None,
) -> Tensor:
    """Return [2, n, blocks] fp32: the largest scaled logit of each block (-inf: no token can be drawn), and the sum of
    exponentials relative to it.

    With `targets` [n] int64, the result is [3, n, blocks], and its last part is the number of tokens in the block that
    are more likely than the target of the row.
    """
    n, vocab = len(scales), logits.shape[1]
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocab, draw.BLOCK)
    weights = torch.empty((2 if targets is None else 3, n, blocks), dtype=torch.float32, device=logits.device)
    grid = (n, triton.cdiv(blocks, _TILE_BLOCKS))
    _weigh_blocks[grid](
        logits,
        scales,
        index,
        lowest,
        targets,
        weights,
        n,
        logits.stride(0),
        vocab,
        blocks,
        _TILE_BLOCKS,
        num_warps=8,
        enable_fp_fusion=False,  # fused, the largest logit would differ from itself by the rounding of its product
    )
    return weights


def norms(weights: Tensor) -> Tensor:
    """Return [2, n] fp32 from `weigh`: the largest logit of each row, and the logarithm of its sum of exponentials
    relative to it. With targets, the result is [3, n], and its last part is the rank of the target, 1 for the largest.

    The largest logit is at least `draw.LOWEST`. The logarithm is NaN for a row with NaN or +inf, and -inf for a row in
    which no token can be drawn.
    """
    parts, n, blocks = weights.shape
    result = torch.empty((parts, n), dtype=torch.float32, device=weights.device)
    _norm_rows[(n,)](weights, result, n, parts == 3, blocks, triton.next_power_of_2(blocks), num_warps=8)
    return result


def target_logprobs(logits: Tensor, targets: Tensor, norms: Tensor) -> Tensor:
    """Return the log-probabilities [n] fp32 of `targets` [n] int64 in rows of `logits` [n, vocab], whose scales are 1.

    `norms` is the result of the function of this name. Minus infinity becomes `draw.LOWEST`. A row with NaN or +inf has
    NaN, a row in which no token can be drawn +inf or NaN.
    """
    n = len(targets)
    result = torch.empty(n, dtype=torch.float32, device=logits.device)
    grid = (triton.cdiv(n, _TARGET_ROWS),)
    _target_rows[grid](logits, targets, norms, result, n, logits.stride(0), _TARGET_ROWS, num_warps=4)
    return result


def draw_rows(
    logits: Tensor,
    scales: Tensor,
    greedy: Tensor,
    keys: Tensor,
    weights: Tensor,
    index: Tensor | None = None,
    lowest: Tensor | None = None,
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, given `weigh` of the same rows with the same `lowest`.

    `greedy` [n] bool, `keys` [n] int64 and the results are those of `draw.choose`. If `norms` [2, n] fp32 is passed,
    the log-probabilities are normalized by it (it may belong to the rows before filters) instead of by `weights`. Then
    the log-probability is +inf for a row without tokens.
    """
    n, vocab = len(scales), logits.shape[1]
    ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    blocks = weights.shape[2]
    _draw_row[(n,)](
        logits,
        scales,
        index,
        lowest,
        norms,
        greedy,
        keys,
        weights,
        ids,
        logprobs,
        n,
        logits.stride(0),
        vocab,
        blocks,
        triton.next_power_of_2(blocks),
        num_warps=8,
        enable_fp_fusion=False,  # a token has the same log-probability, bit for bit, as where PyTorch computes it
    )
    return ids, logprobs


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _weigh_blocks(
    logits: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    lowest: tl.tensor,
    targets: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile) computes `TILE` blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + _source_row(index, row) * STRIDE
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    raw = tl.load(source + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    values = raw * tl.load(scales + row)
    if lowest is not None:
        values = tl.where(values < tl.load(lowest + row), -float("inf"), values)
    top = tl.max(values, 1)
    total = tl.sum(tl.exp(values - tl.where(top == -float("inf"), 0.0, top)[:, None]), 1)
    place = weights + row * BLOCKS + block
    tl.store(place, top, mask=block < BLOCKS)
    tl.store(place + rows.to(tl.int64) * BLOCKS, total, mask=block < BLOCKS)
    if targets is not None:
        target = tl.load(source + tl.load(targets + row)).to(tl.float32)
        above = tl.sum((raw > target).to(tl.float32), 1)
        tl.store(place + 2 * rows.to(tl.int64) * BLOCKS, above, mask=block < BLOCKS)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _norm_rows(
    weights: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    rows = rows.to(tl.int64)
    block = tl.arange(0, WIDTH)
    place = weights + row * BLOCKS + block
    tops = tl.load(place, mask=block < BLOCKS, other=-float("inf"))
    totals = tl.load(place + rows * BLOCKS, mask=block < BLOCKS, other=0.0)
    top = tl.maximum(tl.max(tops, 0), _LOWEST)
    tl.store(result + row, top)
    tl.store(result + rows + row, tl.log(tl.sum(totals * tl.exp(tops - top), 0)))
    if RANKS:
        above = tl.load(place + 2 * rows * BLOCKS, mask=block < BLOCKS, other=0.0)
        tl.store(result + 2 * rows + row, 1 + tl.sum(above, 0))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _target_rows(
    logits: tl.tensor,
    targets: tl.tensor,
    norms: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    target = tl.load(targets + row, mask=is_row, other=0)
    value = tl.load(logits + row * STRIDE + target, mask=is_row, other=0.0).to(tl.float32)
    largest = tl.load(norms + row, mask=is_row, other=0.0)
    rest = tl.load(norms + rows.to(tl.int64) + row, mask=is_row, other=0.0)
    logprob = tl.maximum((value - largest) - rest, _LOWEST, tl.PropagateNan.ALL)
    tl.store(result + row, logprob, mask=is_row)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _draw_row(
    logits: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    lowest: tl.tensor,
    norms: tl.tensor,
    greedy: tl.tensor,
    keys: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    logprobs: tl.tensor,
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = logits + _source_row(index, row) * STRIDE
    scale, key, takes_largest = tl.load(scales + row), tl.load(keys + row), tl.load(greedy + row)
    block = tl.arange(0, WIDTH)
    place = weights + row * BLOCKS + block
    largest = tl.load(place, mask=block < BLOCKS, other=-float("inf"))
    total = tl.load(place + rows.to(tl.int64) * BLOCKS, mask=block < BLOCKS, other=0.0)
    top = tl.max(largest, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    rest = tl.log(tl.sum(total * tl.exp(largest - top), 0))

    noisy = (largest + tl.log(total)).to(tl.float64) + _gumbel(key, -1 - block)
    score = tl.where(takes_largest, largest.to(tl.float64), noisy)
    chosen = tl.minimum(tl.argmax(score, 0), BLOCKS - 1)  # with NaN scores, argmax may return any number
    token = chosen * _BLOCK + tl.arange(0, _BLOCK)
    value = tl.load(source + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32) * scale
    if lowest is not None:
        value = tl.where(value < tl.load(lowest + row), -float("inf"), value)
    score = value.to(tl.float64) + tl.where(takes_largest, 0.0, _gumbel(key, token + 1))
    result = tl.minimum(chosen * _BLOCK + tl.argmax(score, 0), VOCAB - 1)

    tl.store(ids + row, result.to(tl.int64))
    value = tl.load(source + result).to(tl.float32) * scale
    if norms is None:
        logprob = tl.maximum((value - top) - rest, _LOWEST)
        logprob = tl.where(tl.abs(rest) < float("inf"), logprob, float("nan"))
    else:
        rest = tl.load(norms + rows.to(tl.int64) + row)
        logprob = tl.maximum((value - tl.load(norms + row)) - rest, _LOWEST)
        logprob = tl.where(tl.abs(rest) < float("inf"), logprob, -rest)
    tl.store(logprobs + row, logprob)


@triton.jit  # type: ignore[untyped-decorator]
def _source_row(index: tl.tensor, row: tl.tensor) -> tl.tensor:
    if index is None:
        return row
    else:
        return tl.load(index + row)


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel(key: tl.tensor, counter: tl.tensor) -> tl.tensor:
    """Compute `draw.gumbel`."""
    words = key + counter.to(tl.int64) * _GOLDEN
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _MIX_1
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    words = words ^ ((words >> 31) & 0x1FFFFFFFF)
    uniform = (((words >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))
