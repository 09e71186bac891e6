"""The offline workload on SGLang: `python -m benchmarks.peers.sglang_offline --shape 0.6b` with SGLang's Python."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_offline import Generate, run_peer
from benchmarks.shapes import SHAPES
from benchmarks.workload import Workload

ON_GPU: dict[str, Any] = {"cuda_graph_max_bs_decode": 256}
ON_CPU: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 2**16,  # else its size follows from the memory of the host
}


@contextlib.contextmanager
def start(folder: Path, args: argparse.Namespace) -> Iterator[Generate]:
    if args.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang  # type: ignore[import-not-found]

    engine = sglang.Engine(
        model_path=str(folder),
        load_format="dummy" if args.weights == "dummy" else "auto",
        skip_tokenizer_init=True,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        disable_radix_cache=not args.prefix_cache,
        context_length=SHAPES[args.shape]["max_position_embeddings"],
        max_running_requests=256,
        mem_fraction_static=args.memory,
        **ON_GPU if args.device == "cuda" else ON_CPU,
    )

    def generate(work: Workload) -> list[int]:
        results = engine.generate(
            input_ids=work.prompts, sampling_params=work.sampling_params(), return_logprob=args.logprobs
        )
        return [result["meta_info"]["completion_tokens"] for result in results]

    try:
        yield generate
    finally:
        engine.shutdown()


if __name__ == "__main__":
    run_peer("sglang", __doc__, start)
