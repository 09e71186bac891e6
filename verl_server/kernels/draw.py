"""Drawing a token from each row of logits, as a function of (request seed, position, distribution) alone.

Gumbel-max in two stages. A row is divided into blocks of `BLOCK` token ids. The first stage chooses the block with the
largest sum of log-weight (logsumexp of its logits) and Gumbel noise, the second one the token of that block with the
largest sum of logit and noise. A block is chosen with the total probability of its tokens, so the result has the
distribution of a single draw over all tokens. But a row of a large vocabulary needs about a thousand random numbers
instead of one for each token, and the block weights are intermediate results of the normalizer that log-probabilities
need anyway.

The noise is a hash of (row key, counter): SplitMix64 (Steele et al., 2014) with the row key as seed. Counter t + 1
belongs to token t, counter -1 - b to block b. The noise is fp64, so that CPU and GPU compute the same values, and is
made of uniform numbers of 52 bits. This module defines the draw in PyTorch for any device; `kernels.sampling` computes
the same on CUDA, and `kernels.cpu` on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 64
"""Token ids in a block. Part of the definition: another size draws other tokens."""

GOLDEN, MIX_1, MIX_2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's increment and multipliers. Words are int64 that wrap around, which NumPy, PyTorch and Triton support."""

LOWEST = torch.finfo(torch.float32).min
"""Value that replaces a log-probability of minus infinity."""

SPAN = 100.0
"""A token whose logit is this far below the largest one is never drawn, because the noise spans less than 45. Its
probability is 0 in fp32."""

_CACHED_ELEMENTS = 2**18
"""Logits processed at once on the CPU: they and their exponentials stay in the second-level cache."""

Words = npt.NDArray[np.int64]
W = TypeVar("W", Words, Tensor)
Choose = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Type of `choose`, and of the kernels that compute the same."""


def mix(words: W) -> W:
    """SplitMix64's output function, applied to each int64 word; shifts are logical."""
    words = (words ^ ((words >> 30) & (2**34 - 1))) * MIX_1
    words = (words ^ ((words >> 27) & (2**37 - 1))) * MIX_2
    return words ^ ((words >> 31) & (2**33 - 1))


def row_keys(mixed_seeds: Words, positions: Words) -> Words:
    """Return each row's key, int64 [n], from its request seed after `mix` and the position of the token to sample."""
    return mix(mixed_seeds + (positions + 1) * GOLDEN)


def choose(logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Choose one token for each row of `logits` [n, vocab], of any float dtype, which are not changed.

    The logits are multiplied by `scales` [n] fp32 (1 / temperature). Rows with `greedy` [n] bool take the largest logit
    instead of a draw. `keys` [n] int64 are from `row_keys`. Return ids int64 [n] and their log-probabilities fp32 [n]
    over the whole row. For a row with NaN or +inf, or without finite values, these are a valid id and NaN.
    """
    n, vocab = logits.shape
    at_once = n if logits.is_cuda else max(1, _CACHED_ELEMENTS // vocab)
    if n <= at_once:
        return _choose(logits, scales, greedy, keys)
    chunks = (torch.split(t, at_once) for t in (logits, scales, greedy, keys))
    parts = [_choose(*chunk) for chunk in zip(*chunks, strict=True)]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _choose(logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits * scales.unsqueeze(1)
    tops = _by_block(logits, torch.amax)
    top = tops.amax(-1, keepdim=True)
    sums = _by_block((logits - top).exp_(), torch.sum)
    norm = sums.sum(-1, keepdim=True).log_()  # `top` is not added: at a low temperature, `norm` would lose its digits
    if logits.is_cpu and greedy.all():
        ids = logits.argmax(-1, keepdim=True)
    else:
        ids = _draw(logits, tops, sums, greedy.unsqueeze(1), keys.unsqueeze(1))
    logprobs = logits.gather(1, ids).sub_(top).sub_(norm).clamp_(min=LOWEST)
    return ids.squeeze(1), logprobs.masked_fill_(~norm.isfinite(), torch.nan).squeeze(1)


def _draw(logits: Tensor, tops: Tensor, sums: Tensor, greedy: Tensor, keys: Tensor) -> Tensor:
    """Draw ids [n, 1] in two stages, from the largest logit and the sum of exponentials of each block."""
    counters = torch.arange(-1, -1 - sums.shape[1], -1, device=logits.device)
    scores = torch.where(greedy, tops.double(), gumbel(keys, counters).add_(sums.log()))
    members = scores.argmax(-1, keepdim=True) * BLOCK + torch.arange(BLOCK, device=logits.device)
    outside, members = members >= logits.shape[1], members.clamp_(max=logits.shape[1] - 1)
    noise = gumbel(keys, members + 1).masked_fill_(greedy, 0.0)
    scores = noise.add_(logits.gather(1, members)).masked_fill_(outside, -torch.inf)
    return members.gather(1, scores.argmax(-1, keepdim=True))


def _by_block(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce `values` [n, vocab] to [n, blocks]; the last block may be shorter."""
    whole = values.shape[1] // BLOCK * BLOCK
    reduced = reduce(values[:, :whole].reshape(len(values), whole // BLOCK, BLOCK), dim=-1)
    if whole == values.shape[1]:
        return reduced
    return torch.cat([reduced, reduce(values[:, whole:], dim=-1, keepdim=True)], dim=1)


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Return Gumbel noise [n, m], fp64, for keys [n, 1] and counters [m] or [n, m]: -log(-log(u)), 0 < u < 1."""
    if keys.is_cuda:
        return -torch.log(-torch.log((_bits(keys, counters).double() + 0.5) * 2.0**-52))
    # NumPy on one thread: for a few thousand numbers, starting PyTorch's threads costs more time than they save.
    return torch.from_numpy(-np.log(-np.log((_bits(keys.numpy(), counters.numpy()) + 0.5) * 2.0**-52)))


def _bits(keys: W, counters: W) -> W:
    """52 random bits. The uniform number (bits + 0.5) * 2^-52 is exact in fp64, and is neither 0 nor 1."""
    return (mix(keys + counters * GOLDEN) >> 12) & (2**52 - 1)
