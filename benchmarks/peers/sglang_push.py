"""SGLang's own `update_weights_from_tensor`, timed as `benchmarks.weight_sync` times a push, without requests.

    python -m benchmarks.peers.sglang_push --shape 8b
    python -m benchmarks.peers.sglang_push --shape 30b-a3b --memory 0.47 --bucket-gib 4

The tensors are in this process, and SGLang's scheduler is another one on the same GPU, which opens them through CUDA
IPC. Before each update every tensor is written in place. `--bucket-gib` sends them in several calls, as trainers do
whose copy of the weights must be small; the cache is flushed by the last call. The line `push` has the median of
`--updates` updates beside plain copies of the same bytes (`limit_ms`). After the last update the
greedy tokens must differ from those of the loaded weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.copy_limit import better, measure
from benchmarks.served_slices import traffic, whole_tensors
from benchmarks.shapes import SHAPES, shape_folder


def greedy(engine: Any) -> Any:
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    return engine.generate(input_ids=[9, 8, 7, 6, 5], sampling_params=params)["output_ids"]


def buckets(tensors: list[tuple[str, torch.Tensor]], most: float) -> list[list[tuple[str, torch.Tensor]]]:
    """The tensors in order, in lists of at most `most` bytes each (or of one tensor that is larger)."""
    found: list[list[tuple[str, torch.Tensor]]] = [[]]
    size = 0
    for name, tensor in tensors:
        if found[-1] and size + tensor.nbytes > most:
            found.append([])
            size = 0
        found[-1].append((name, tensor))
        size += tensor.nbytes
    return found


def update(engine: Any, parts: list[list[tuple[str, torch.Tensor]]]) -> float:
    """Send all tensors. Returns the seconds."""
    start = time.perf_counter()
    for number, part in enumerate(parts, 1):
        success, message = engine.update_weights_from_tensor(part, flush_cache=number == len(parts))
        if not success:
            raise RuntimeError(f"SGLang refused the update: {message}")
    return time.perf_counter() - start


def benchmark(args: argparse.Namespace) -> None:
    on_gpu = args.device == "cuda"
    if not on_gpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang  # type: ignore[import-not-found]

    from benchmarks.peers.sglang_offline import ON_CPU

    dtype = torch.bfloat16 if on_gpu else torch.float32
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(temporary, args.shape)
        served = whole_tensors(folder)
        elements = dict(traffic(served, 1))
        before = measure(args.device, elements, dtype, dtype)
        options: dict[str, Any] = {"mem_fraction_static": args.memory} if on_gpu else ON_CPU
        engine = sglang.Engine(
            model_path=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            device=args.device,
            dtype=str(dtype).removeprefix("torch."),
            **options | {"disable_cuda_graph": True},
        )
        try:
            tensors = [(t.name, torch.randn(t.shape, dtype=dtype, device=args.device)) for t in served]
            parts = buckets(tensors, args.bucket_gib * 2**30 if args.bucket_gib else float("inf"))
            loaded, seconds = greedy(engine), []
            for number in range(args.warmup + args.updates):
                for _, tensor in tensors:
                    tensor.add_(0.01 * (number + 1))
                if on_gpu:
                    torch.cuda.synchronize()
                seconds.append(update(engine, parts))
            if greedy(engine) == loaded:
                raise AssertionError("SGLang generates what it generated before all updates.")
        finally:
            engine.shutdown()
        nbytes = sum(tensor.nbytes for _, tensor in tensors)
        calls = len(parts)
        del tensors, parts
        limit = better(before, measure(args.device, elements, dtype, dtype))["all_ms"]
    milliseconds = [1e3 * each for each in seconds[args.warmup :]]
    median = statistics.median(milliseconds)
    line = {
        "name": "push",
        "value": round(median, 4),
        "unit": "ms",
        "peer": f"sglang {sglang.__version__}",
        "command": "python -m benchmarks.peers.sglang_push " + " ".join(sys.argv[1:]),
        "bytes": nbytes,
        "median_ms": round(median, 3),
        "worst_ms": round(max(milliseconds), 3),
        "first_ms": round(1e3 * seconds[0], 3),
        "limit_ms": round(limit, 3),
        "ratio": round(median / limit, 3),
        "updates": args.updates,
        "calls": calls,
    }
    print(json.dumps(line), flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where the engine runs (cuda)")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="shape of the model (8b)")
    parser.add_argument("--updates", type=int, default=10, help="measured updates (10)")
    parser.add_argument("--warmup", type=int, default=3, help="updates before the measured ones (3)")
    parser.add_argument("--bucket-gib", type=float, help="most GiB of a call (all tensors in one call)")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for SGLang (0.5)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    benchmark(parse_args())
