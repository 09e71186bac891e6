"""The offline workload on vLLM: `python -m benchmarks.peers.vllm_offline --shape 0.6b` with vLLM's Python."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.peer_offline import Generate, run_peer
from benchmarks.shapes import SHAPES
from benchmarks.workload import Workload


@contextlib.contextmanager
def start(folder: Path, args: argparse.Namespace) -> Iterator[Generate]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    memory = args.memory if args.device == "cuda" else 0.3  # on the CPU, a share of host memory
    llm = LLM(
        model=str(folder),
        load_format="dummy" if args.weights == "dummy" else "auto",
        skip_tokenizer_init=True,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        enable_prefix_caching=args.prefix_cache,
        max_model_len=SHAPES[args.shape]["max_position_embeddings"],
        max_num_seqs=256,
        **({} if memory is None else {"gpu_memory_utilization": memory}),
    )

    def generate(work: Workload) -> list[int]:
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        params = [
            SamplingParams(
                temperature=work.temperature,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if args.logprobs else None,
            )
            for length in work.output_lens
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    yield generate


if __name__ == "__main__":
    run_peer("vllm", __doc__, start)
