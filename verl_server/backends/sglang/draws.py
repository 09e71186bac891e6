"""Draws of SGLang's sampler: a function of the request's seed, the position and the distribution, as everywhere here.

SGLang reads seeds only with `enable_deterministic_inference`, which also takes slower kernels, and sorts the vocabulary
for each filter. `launch` registers these functions as hooks in SGLang's processes. They draw as the embedded engine
does, with the same tokens for the same seeds and logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_server.kernels import draw
from verl_server.sampling.distribution import SamplingOps
from verl_server.sampling.filters import Filters

BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
SAMPLE = "sglang.srt.layers.sampler.Sampler._sample_from_probs"


def with_seeds(original: Callable[..., Any], cls: Any, batch: Any, vocab_size: int) -> Any:
    """Add the seeds of the requests to SGLang's settings of a batch. `SglangDriver` gives each request a seed."""
    info = original(cls, batch, vocab_size)
    seeds = torch.tensor([req.sampling_params.sampling_seed for req in batch.reqs], dtype=torch.int64)
    device = info.temperatures.device
    info.sampling_seed = seeds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else seeds
    return info


def sample(_: Any, probs: Tensor, info: Any, positions: Tensor, is_simple: bool) -> Tensor:
    """Draw a token for each row of `probs` [n, vocab] fp32, which are not changed. Return ids int32 [n].

    `is_simple`: no row has top-k, top-p or min-p. A greedy row has top-k 1.
    """
    logits, n = probs.log(), len(probs)
    keys = draw.mix(draw.mix(info.sampling_seed) + (positions.to(torch.int64) + 2) * draw.GOLDEN)
    rows = _ops(logits).distribution(logits, None, torch.ones(n, dtype=torch.float32, device=logits.device))
    greedy = torch.zeros(n, dtype=torch.bool, device=logits.device)
    if not is_simple:
        greedy = info.top_ks == 1
        rows = rows.filtered(_filters(info, logits))
    return rows.draw(greedy, keys)[0].to(torch.int32)


@dataclass
class _FilterColumns:
    """What `FusedDistribution` reads of `Filters`, from SGLang's tensors and without waiting for the device."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    by_count: bool
    by_mass: bool


def _ops(logits: Tensor) -> SamplingOps:
    if not logits.is_cuda:
        return SamplingOps()
    from verl_server.sampling.fused import FusedOps

    return FusedOps()


def _filters(info: Any, logits: Tensor) -> Any:
    top_k, top_p, min_p = info.top_ks, info.top_ps, info.min_ps
    if not logits.is_cuda:
        return Filters(top_k.tolist(), top_p.tolist(), min_p.tolist(), logits.shape[1], logits.device)
    return _FilterColumns(
        top_k=top_k.to(torch.int32).clamp(max=logits.shape[1]),
        top_p=top_p.double().masked_fill(top_p >= 1.0, torch.inf),
        log_min_p=min_p.log(),
        by_count=info.need_top_k_sampling,
        by_mass=info.need_top_p_sampling,
    )
