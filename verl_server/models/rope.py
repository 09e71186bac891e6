"""The frequencies of the rotary embedding, for each way to stretch it over longer contexts.

`RotaryEmbedding` calls `frequencies` once, with the context length of the server, and builds its tables from the
result. The results are those of transformers (`modeling_rope_utils`) for the same config.

Keys in the KV cache were rotated when their tokens were computed, and are not rotated again. So one set of frequencies
must hold for every position that the server may compute. transformers chooses by the length of each sequence in two
cases, and changes the frequencies when a sequence grows. Here the context length decides, once:

- `longrope`: `short_factor` if the context length is at most `original_max_position_embeddings`, else `long_factor`,
  also for sequences that are still short. A sequence has the values of transformers if it ends on the same side.
- `dynamic`: the frequencies change beyond `max_position_embeddings` with every token. No context longer than that
  is permitted, and up to there the frequencies are those of `default`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verl_server.errors import BadRequestError


def frequencies(head_dim: int, rope: dict[str, Any], context_length: int) -> tuple[Tensor, float]:
    """Return (inverse frequencies [head_dim / 2] in fp32, the factor by which cos and sin are multiplied).

    `rope` is `ModelConfig.rope`. `context_length` is the most tokens that a sequence may have. Raise BadRequestError
    if the values of `rope` are so large or so small that an angle or the factor exceeds the range of fp32.
    """
    inv_freq, scale = _frequencies(head_dim, rope, context_length)
    largest = torch.finfo(torch.float32).max
    # Comparisons with NaN are False.
    if not bool((inv_freq * float(context_length) <= largest).all()) or not scale <= largest:
        raise BadRequestError(
            f"The rotary embedding of rope type {rope['rope_type']!r} exceeds the range of fp32. Check the numbers of "
            "rope_scaling, rope_parameters and rope_theta in config.json: one of them is too large or too small."
        )
    return inv_freq, scale


def _frequencies(head_dim: int, rope: dict[str, Any], context_length: int) -> tuple[Tensor, float]:
    kind = rope["rope_type"]
    powers = float(rope["rope_theta"]) ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "linear":
        return 1.0 / powers / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers, rope), 1.0
    if kind == "yarn":
        return _yarn(powers, rope), _yarn_attention_factor(rope)
    if kind == "longrope":
        stretched = context_length > rope["original_max_position_embeddings"]
        factors = torch.tensor(rope["long_factor" if stretched else "short_factor"], dtype=torch.float32)
        return 1.0 / (factors * powers), _longrope_attention_factor(rope)
    return 1.0 / powers, 1.0


def _llama3(inv_freq: Tensor, rope: dict[str, Any]) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and interpolate those between."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / float(rope["factor"]) + smooth * inv_freq


def _yarn(powers: Tensor, rope: dict[str, Any]) -> Tensor:
    """Stretch frequencies with few rotations within the original context, keep those with many, and blend between.

    Source: YaRN, arXiv:2309.00071, section 3.2.
    """
    half, theta, context = powers.numel(), float(rope["rope_theta"]), rope["original_max_position_embeddings"]

    def index(rotations: float) -> float:
        """Return the index of the frequency that rotates this many times within the original context."""
        return half * math.log(context / (rotations * 2 * math.pi)) / math.log(theta)

    first, last = index(rope.get("beta_fast") or 32), index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(half, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return stretched / (float(rope["factor"]) * powers) + (1 - stretched) / powers


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _longrope_attention_factor(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope["factor"] <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope["factor"]) / math.log(rope["original_max_position_embeddings"]))
