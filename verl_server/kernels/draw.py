"""The draw: a token from each row of logits, as a function of (request seed, position, distribution) alone.

Gumbel-max in two stages. A row falls into blocks of `BLOCK` token ids. The block whose log-weight (logsumexp of its
logits) plus Gumbel noise is the largest wins, then the token in it whose logit plus noise is. Blocks win with the
probability of all their tokens, so the result is distributed as one draw over all of them; but a row of a large
vocabulary needs a thousand noises instead of one for each token, and the block weights fall off on the way to the
normalizer that log-probabilities need anyway.

Noise comes from a hash of (row key, counter): SplitMix64 (Steele et al., 2014), of which a row's key is the seed;
counter t + 1 is token t's, counter -1 - b is block b's. It is fp64, so that CPU and GPU agree on it, and has a
uniform's 52 bits. Here is the definition in PyTorch, for any device; `kernels.sampling` does the same on CUDA,
and `kernels.cpu` on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 64
"""Part of the definition: another size draws other tokens."""

GOLDEN, MIX_1, MIX_2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's increment and multipliers. Words are int64 that wrap around: NumPy, PyTorch and Triton all have them."""

LOWEST = torch.finfo(torch.float32).min

_CACHED_ELEMENTS = 2**18
"""Logits taken at once on the CPU: they and their exponentials stay in the second-level cache."""

Words = npt.NDArray[np.int64]
W = TypeVar("W", Words, Tensor)
Choose = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`choose`, or a kernel of the same meaning."""


def mix(words: W) -> W:
    """SplitMix64's output function, of each int64 word; shifts are logical."""
    words = (words ^ ((words >> 30) & (2**34 - 1))) * MIX_1
    words = (words ^ ((words >> 27) & (2**37 - 1))) * MIX_2
    return words ^ ((words >> 31) & (2**33 - 1))


def row_keys(mixed_seeds: Words, positions: Words) -> Words:
    """The key of each row from its `mix`ed request seed and the position of the token to be sampled."""
    return mix(mixed_seeds + (positions + 1) * GOLDEN)


def choose(logits: Tensor, scales: Tensor, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of logits [n, vocab], of any float dtype; they are kept.

    `scales` [n] fp32 multiply the logits (1 / temperature), `greedy` [n] bool takes the largest instead of drawing,
    `keys` [n] int64 are `row_keys`. Returns ids int64 [n] and their log-probabilities fp32 [n] over the whole row.
    A row with NaN or +inf, or nothing finite, gives some valid id and NaN.
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
    norm = sums.sum(-1, keepdim=True).log_()  # less `top`: at a low temperature their sum would lose its digits
    if logits.is_cpu and greedy.all():
        ids = logits.argmax(-1, keepdim=True)
    else:
        ids = _draw(logits, tops, sums, greedy.unsqueeze(1), keys.unsqueeze(1))
    logprobs = logits.gather(1, ids).sub_(top).sub_(norm).clamp_(min=LOWEST)
    return ids.squeeze(1), logprobs.masked_fill_(~norm.isfinite(), torch.nan).squeeze(1)


def _draw(logits: Tensor, tops: Tensor, sums: Tensor, greedy: Tensor, keys: Tensor) -> Tensor:
    """The two stages, from each block's largest logit and sum of exponentials. [n, 1]"""
    counters = torch.arange(-1, -1 - sums.shape[1], -1, device=logits.device)
    scores = torch.where(greedy, tops.double(), gumbel(keys, counters).add_(sums.log()))
    members = scores.argmax(-1, keepdim=True) * BLOCK + torch.arange(BLOCK, device=logits.device)
    outside, members = members >= logits.shape[1], members.clamp_(max=logits.shape[1] - 1)
    noise = gumbel(keys, members + 1).masked_fill_(greedy, 0.0)
    scores = noise.add_(logits.gather(1, members)).masked_fill_(outside, -torch.inf)
    return members.gather(1, scores.argmax(-1, keepdim=True))


def _by_block(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[n, blocks] from [n, vocab]; the last block may be a shorter one."""
    whole = values.shape[1] // BLOCK * BLOCK
    reduced = reduce(values[:, :whole].reshape(len(values), whole // BLOCK, BLOCK), dim=-1)
    if whole == values.shape[1]:
        return reduced
    return torch.cat([reduced, reduce(values[:, whole:], dim=-1, keepdim=True)], dim=1)


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise, fp64, for keys [n, 1] and counters [m] or [n, m]: -log(-log(u)), u inside (0, 1)."""
    if keys.is_cuda:
        return -torch.log(-torch.log((_bits(keys, counters).double() + 0.5) * 2.0**-52))
    # A few thousand numbers: PyTorch's threads cost more than they bring.
    return torch.from_numpy(-np.log(-np.log((_bits(keys.numpy(), counters.numpy()) + 0.5) * 2.0**-52)))


def _bits(keys: W, counters: W) -> W:
    """52 random bits: as uniforms, half a step away from 0 and from 1, they are exact in fp64."""
    return (mix(keys + counters * GOLDEN) >> 12) & (2**52 - 1)
