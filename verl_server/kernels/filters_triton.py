"""The lowest logit that top-k, top-p and min-p keep, found by search instead of a sort of the vocabulary.

Both rank filters ask how many tokens, or how much probability, lie above a logit, and both answers fall as the logit
grows. So the lowest kept logit is the least logit of the row at which fewer than k tokens and less than a probability
of p lie above. One program searches a row. Each pass over the row evaluates four thresholds in the interval that holds
the result: first at equal distances, then around the place at which interpolation expects the result. The search ends
when all tokens in the interval have the same logit. Logits of bf16 take about four passes. `sampling.filters` is the
definition, which sorts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import draw

_LOWEST = tl.constexpr(draw.LOWEST)
_SPAN = tl.constexpr(draw.SPAN)
_LANES, _VECTOR, _WARPS, _REGISTERS = 1024, tl.constexpr(8), 16, 64
"""A program reads `_LANES` vectors at a time. Each thread adds up its own vectors, and the sums meet after a pass. With
so few registers, the programs of 256 rows fit on the GPU at the same time."""
_NEAR, _FAR = tl.constexpr(0.03), tl.constexpr(0.15)
"""Distances of the thresholds from the expected place, as shares of the interval."""
_MOST_PASSES = tl.constexpr(64)
"""More passes than any interval of fp32 numbers needs: two of them divide it by five or more."""


def lowest_kept(
    logits: Tensor,
    scales: Tensor,
    index: Tensor,
    weights: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    *,
    by_count: bool = True,
    by_mass: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the lowest scaled logit of each row that all filters keep, [n] fp32, and the result of `sampling.norms`.

    The lowest logit is -inf if the filters keep all tokens. `logits`, `scales` and `index` are those of
    `kernels.sampling`, and `weights` its result for them. `top_k` [n] int32, `top_p` [n] fp64 and `log_min_p` [n] fp32
    are the filters of each row: at least the size of the vocabulary, at least 1 and -inf for no filter. `by_count` is
    False if no row has top-k, `by_mass` is False if no row has top-p.
    """
    n, vocab, blocks = len(scales), logits.shape[1], weights.shape[2]
    assert logits.stride(1) == 1
    lowest = torch.empty(n, dtype=torch.float32, device=logits.device)
    norms = torch.empty((2, n), dtype=torch.float32, device=logits.device)
    _search_row[(n,)](
        logits,
        scales,
        index,
        weights,
        top_k,
        top_p,
        log_min_p,
        lowest,
        norms,
        n,
        logits.stride(0),
        vocab,
        blocks,
        triton.next_power_of_2(blocks),
        by_count,
        by_mass,
        _LANES,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        maxnreg=_REGISTERS,
    )
    return lowest, norms


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _search_row(
    logits: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    weights: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    lowest: tl.tensor,
    norms: tl.tensor,
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    rows = rows.to(tl.int64)
    source = logits + tl.load(index + row) * STRIDE
    scale, k, p = tl.load(scales + row), tl.load(top_k + row), tl.load(top_p + row)

    block = tl.arange(0, WIDTH)
    place = weights + row * BLOCKS + block
    tops = tl.load(place, mask=block < BLOCKS, other=-float("inf"))
    totals = tl.load(place + rows * BLOCKS, mask=block < BLOCKS, other=0.0)
    largest = tl.maximum(tl.max(tops, 0), _LOWEST)
    total = tl.sum(totals * tl.exp(tops - largest), 0)
    tl.store(norms + row, largest)
    tl.store(norms + rows + row, tl.log(total))

    # Invariant: the result lies in (low, high]. The tokens up to the second bound of `low` have less than 1 - p
    # together. Where there are fewer than k tokens above `low`, all of these are kept.
    mass = tl.where(p < 1.0, p * total.to(tl.float64), float("inf")).to(tl.float32)
    missing = tl.maximum(1.0 - p, 0.0).to(tl.float32)
    low = tl.maximum(largest - _SPAN, largest + tl.log(total * missing / VOCAB) - 0.01)
    high, mass_low, mass_high = largest, total, total * 0.0
    count_low, count_high = tl.full([], VOCAB, tl.int32), tl.full([], 0, tl.int32)
    found = tl.full([], -float("inf"), tl.float32)
    interpolates = low > high  # false
    passes = tl.where((k < VOCAB) | (p < 1.0), 0, _MOST_PASSES)
    while passes < _MOST_PASSES:
        width = high - low
        expected = low
        if BY_MASS:
            expected = tl.maximum(expected, low + width * (mass_low - mass) / (mass_low - mass_high))
        if BY_COUNT:
            least_count = tl.maximum(count_high.to(tl.float32), 0.5)
            share = tl.log(count_low / (k - 0.5)) / tl.log(count_low / least_count)
            expected = tl.maximum(expected, low + width * share)
        first = _between(low, tl.where(interpolates, expected - _FAR * width, low + 0.2 * width), high)
        second = _between(low, tl.where(interpolates, expected - _NEAR * width, low + 0.4 * width), high)
        third = _between(low, tl.where(interpolates, expected + _NEAR * width, low + 0.6 * width), high)
        fourth = _between(low, tl.where(interpolates, expected + _FAR * width, low + 0.8 * width), high)
        lanes = tl.zeros([LANES], tl.float32)
        masses_1, masses_2, masses_3, masses_4 = lanes, lanes, lanes, lanes
        none = tl.zeros([LANES], tl.int32)
        counts_1, counts_2, counts_3, counts_4 = none, none, none, none
        least, most = lanes + float("inf"), lanes - float("inf")
        for start in range(0, VOCAB, LANES * _VECTOR):
            token = start + tl.arange(0, LANES)[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]
            values = tl.load(source + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32) * scale
            if BY_MASS:
                exponentials = tl.exp(values - largest)
                masses_1 += tl.sum(tl.where(values > first, exponentials, 0.0), 1)
                masses_2 += tl.sum(tl.where(values > second, exponentials, 0.0), 1)
                masses_3 += tl.sum(tl.where(values > third, exponentials, 0.0), 1)
                masses_4 += tl.sum(tl.where(values > fourth, exponentials, 0.0), 1)
            if BY_COUNT:
                counts_1 += tl.sum((values > first).to(tl.int32), 1)
                counts_2 += tl.sum((values > second).to(tl.int32), 1)
                counts_3 += tl.sum((values > third).to(tl.int32), 1)
                counts_4 += tl.sum((values > fourth).to(tl.int32), 1)
            inside = (values > low) & (values <= high)
            least = tl.minimum(least, tl.min(tl.where(inside, values, float("inf")), 1))
            most = tl.maximum(most, tl.max(tl.where(inside, values, -float("inf")), 1))
        bottom, top = tl.min(least, 0), tl.max(most, 0)
        if bottom < top:
            mass_1, mass_2, mass_3, mass_4 = _sum(masses_1), _sum(masses_2), _sum(masses_3), _sum(masses_4)
            count_1, count_2 = tl.sum(counts_1, 0), tl.sum(counts_2, 0)
            count_3, count_4 = tl.sum(counts_3, 0), tl.sum(counts_4, 0)
            # The number of thresholds below the result: those that have too much above them.
            below = ((count_1 >= k) | (mass_1 >= mass)).to(tl.int32) + ((count_2 >= k) | (mass_2 >= mass)).to(tl.int32)
            below += ((count_3 >= k) | (mass_3 >= mass)).to(tl.int32) + ((count_4 >= k) | (mass_4 >= mass)).to(tl.int32)
            low = _pick(below, low, first, second, third, fourth)
            high = _pick(below, first, second, third, fourth, top)
            mass_low = _pick(below, mass_low, mass_1, mass_2, mass_3, mass_4)
            mass_high = _pick(below, mass_1, mass_2, mass_3, mass_4, mass_high)
            count_low = _pick(below, count_low, count_1, count_2, count_3, count_4)
            count_high = _pick(below, count_1, count_2, count_3, count_4, count_high)
            interpolates = high - low < 0.25 * width
            passes += 1
        else:
            found = tl.where(bottom == top, bottom, found)
            passes += _MOST_PASSES
    if BY_COUNT or BY_MASS:
        found = tl.where((k < VOCAB) | (p < 1.0), tl.maximum(found, largest - _SPAN), found)
    tl.store(lowest + row, tl.maximum(found, largest + tl.load(log_min_p + row)))


@triton.jit  # type: ignore[untyped-decorator]
def _between(low: tl.tensor, value: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(lanes: tl.tensor) -> tl.tensor:
    return tl.sum(lanes.to(tl.float64), 0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _pick(
    place: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor, fifth: tl.tensor
) -> tl.tensor:
    late = tl.where(place == 2, third, tl.where(place == 3, fourth, fifth))
    return tl.where(place == 0, first, tl.where(place == 1, second, late))
