"""The offline workload on transformers' continuous batching.

    python -m benchmarks.peers.transformers_offline --shape tiny --device cpu

This script draws random weights and ignores `--weights`, because transformers has no dummy loading.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.peer_offline import Generate, run_peer
from benchmarks.workload import Workload, make_workload

_RESULT_SECONDS = 600.0
_CPU_BLOCKS = 256
"""Number of KV blocks of 256 tokens on the CPU. (By default transformers takes all of the machine's memory.)"""


@contextlib.contextmanager
def start(folder: Path, args: argparse.Namespace) -> Iterator[Generate]:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="sdpa"
        )
    temperature = make_workload(args.shape).temperature  # the same for all requests
    config = GenerationConfig(do_sample=True, temperature=temperature, eos_token_id=-1)  # -1: no token ends a request
    batching = ContinuousBatchingConfig(
        return_logprobs=args.logprobs,
        allow_block_sharing=args.prefix_cache,
        max_requests_per_batch=256,
        num_blocks=None if args.device == "cuda" else _CPU_BLOCKS,
    )
    with model.continuous_batching_context_manager(config, continuous_batching_config=batching) as manager:
        yield lambda work: _generate(manager, work)


def _generate(manager: Any, work: Workload) -> list[int]:
    pairs = zip(work.prompts, work.output_lens, strict=True)
    names = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in pairs]
    lengths: dict[str, int] = {}
    while len(lengths) < len(names):
        result = manager.get_result(timeout=_RESULT_SECONDS)
        if result is None or result.error is not None:
            reason = result.error if result else f"it stopped, or did not answer within {_RESULT_SECONDS:g} s"
            raise RuntimeError(f"transformers returned no result: {reason}")
        lengths[result.request_id] = len(result.generated_tokens)
    return [lengths[name] for name in names]


if __name__ == "__main__":
    run_peer("transformers", __doc__, start)
