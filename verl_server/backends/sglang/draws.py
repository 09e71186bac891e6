"""Draws of SGLang's sampler: a function of the request's seed, the position and the distribution, as everywhere here.

SGLang reads seeds only with `enable_deterministic_inference`, which also takes slower kernels. `launch` registers both
functions as hooks in SGLang's processes. The draw itself is that of `kernels.draw`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_server.kernels import draw as kernel

BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
DRAW = "sglang.srt.layers.sampler.multinomial_with_seed"


def with_seeds(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add the seeds of the requests to SGLang's settings of a batch. `SglangDriver` gives each request a seed."""
    info = original(*args, **kwargs)
    batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "reqs"))
    seeds = torch.tensor([req.sampling_params.sampling_seed for req in batch.reqs], dtype=torch.int64)
    on_gpu = info.temperatures.is_cuda
    info.sampling_seed = (seeds.pin_memory() if on_gpu else seeds).to(info.temperatures.device, non_blocking=True)
    return info


def draw(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one index for each row of `logprobs` [n, m], which need not be normalized. Return int64 [n, 1]."""
    if logprobs.is_cuda:
        from verl_server.kernels.sampling import choose
    else:
        choose = kernel.choose
    seeds, positions = seeds.to(torch.int64), positions.to(torch.int64)
    keys = kernel.mix(kernel.mix(seeds) + (positions + 1) * kernel.GOLDEN)
    ones = torch.ones(len(logprobs), dtype=torch.float32, device=logprobs.device)
    ids, _ = choose(logprobs, ones, torch.zeros_like(ones, dtype=torch.bool), keys)
    return ids.unsqueeze(1)
