"""Offline throughput through `Engine`, in process: one JSON line per figure, with a peer and the limit beside it.

    python -m benchmarks.offline --device cpu --shape tiny
    python -m benchmarks.offline --device cuda --shape 0.6b

Random weights in the shape of a Qwen3, prefix cache off, `ignore_eos`, log-probabilities on (`--no-logprobs`
turns them off). `tiny` is 64 sequences of 128 + 128 tokens; the other shapes run nano-vllm's workload: 256
prompts of 100..1024 random ids, 256 output lengths of 100..1024, `random.seed(0)`, temperature 0.6.
Each figure is the median of `--repeats` runs after a warm-up run; `spread` is (slowest, fastest).

`limit` is what the measured ceilings of this machine (one matrix product, one copy, in the same run) would
allow: prefill at the product's rate, then decode at the larger of arithmetic and memory traffic (weights once
a step, keys and values once a token), with nothing else costing any time.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.shapes import SHAPES, shape_folder
from verl_server.engine import Engine
from verl_server.models.layers import linear


@dataclass(frozen=True)
class Peer:
    """Measured once on a machine of the kind named; all without what is not said."""

    name: str
    output_tokens_per_s: float
    single_tokens_per_s: float | None
    seconds_to_ready: float


PEERS = {
    ("cpu", "tiny"): Peer("vLLM CPU 0.32.0, log-probabilities on, 2 cores with AVX-512", 762.0, None, 116.0),
    ("cuda", "0.6b"): Peer("vLLM 0.26.0, one H200, bf16, no log-probabilities", 22042.0, 437.0, 184.0),
    ("cuda", "8b"): Peer("vLLM 0.26.0, one H200, bf16, no log-probabilities", 9128.0, 188.0, 62.0),
}


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


def make_workload(shape: str) -> Workload:
    rng = random.Random(0)
    if shape == "tiny":
        return Workload([[rng.randrange(5, 320) for _ in range(128)] for _ in range(64)], [128] * 64, 1.0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return Workload(prompts, [rng.randint(100, 1024) for _ in range(256)], 0.6)


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best: one product, one copy (bytes read + written)."""

    flop_per_s: float
    bytes_per_s: float


def measure_ceilings(device: str, threads: int | None) -> Ceilings:
    if device == "cpu" and threads is not None:
        torch.set_num_threads(threads)
    on_gpu = device == "cuda"
    size, dtype, count = (8192, torch.bfloat16, 2**30) if on_gpu else (1024, torch.float32, 2**25)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = _best_seconds(lambda: linear(a, b), on_gpu)
    source = torch.zeros(count // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy = _best_seconds(lambda: target.copy_(source), on_gpu)
    return Ceilings(2.0 * size**3 / product, 2.0 * count / copy)


def _best_seconds(run: Callable[[], object], on_gpu: bool) -> float:
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def least_seconds(shape: dict[str, Any], work: Workload, ceilings: Ceilings, itemsize: int) -> float:
    """Time of the whole workload if only products and memory traffic cost time, all sequences at once."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    q_size = shape["num_attention_heads"] * shape["head_dim"]
    kv_size = shape["num_key_value_heads"] * shape["head_dim"]
    per_layer = hidden * (2 * q_size + 2 * kv_size + 3 * shape["intermediate_size"])
    body, head = layers * per_layer, hidden * shape["vocab_size"]
    prompt_tokens = sum(map(len, work.prompts))
    # The first output token comes from the prefill.
    decoded = work.output_tokens - len(work.prompts)
    context = sum(n * len(p) + n * n / 2 for p, n in zip(work.prompts, work.output_lens, strict=True))
    pairs = sum(len(p) ** 2 / 2 for p in work.prompts)
    prefill = 2 * body * prompt_tokens + 2 * head * len(work.prompts) + 4 * q_size * layers * pairs
    arithmetic = 2 * (body + head) * decoded + 4 * q_size * layers * context
    steps = max(work.output_lens) - 1
    traffic = itemsize * (steps * (body + head) + 2 * kv_size * layers * context)
    decode = max(arithmetic / ceilings.flop_per_s, traffic / ceilings.bytes_per_s)
    return float(prefill / ceilings.flop_per_s + decode)


def run_once(engine: Engine, work: Workload, logprobs: bool) -> float:
    """Seconds for the whole workload, submitted at once."""
    params = [{"temperature": work.temperature, "max_new_tokens": n, "ignore_eos": True} for n in work.output_lens]
    start = time.perf_counter()
    results = engine.generate(input_ids=work.prompts, sampling_params=params, return_logprob=logprobs)
    seconds = time.perf_counter() - start
    lengths = [len(result["output_ids"]) for result in results]
    assert lengths == work.output_lens, "the engine did not generate what was asked"
    return seconds


def report(name: str, value: float, unit: str, **more: Any) -> None:
    figure = {"name": name, "value": round(value, 4), "unit": unit, "peer": None, "peer_value": None, "limit": None}
    print(json.dumps(figure | more), flush=True)


def rate(engine: Engine, work: Workload, args: argparse.Namespace) -> tuple[float, list[float]]:
    """Median output tokens per second and (slowest, fastest), after a warm-up run."""
    seconds = [run_once(engine, work, not args.no_logprobs) for _ in range(args.repeats + 1)][1:]
    rates = sorted(work.output_tokens / s for s in seconds)
    return statistics.median(rates), [round(rates[0], 1), round(rates[-1], 1)]


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    shape, work, peer = SHAPES[args.shape], make_workload(args.shape), PEERS.get((args.device, args.shape))
    name = peer.name if peer else None
    itemsize = 2 if args.device == "cuda" else 4
    ceilings = measure_ceilings(args.device, args.cpu_threads)
    report("gemm_ceiling", ceilings.flop_per_s / 1e9, "GFLOP/s")
    report("copy_ceiling", ceilings.bytes_per_s / 1e9, "GB/s")
    start = time.perf_counter()
    engine = Engine(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        cpu_threads=args.cpu_threads,
        disable_radix_cache=True,
        max_running_requests=len(work.prompts),
        chunked_prefill_size=args.chunked_prefill_size,
        log_level="warning",
    )
    with engine:
        ready = time.perf_counter() - start
        report("seconds_to_ready", ready, "s", peer=name, peer_value=peer.seconds_to_ready if peer else None)
        median, spread = rate(engine, work, args)
        report(
            "output_tokens_per_s",
            median,
            "tokens/s",
            spread=spread,
            peer=name,
            peer_value=peer.output_tokens_per_s if peer else None,
            limit=round(work.output_tokens / least_seconds(shape, work, ceilings, itemsize), 1),
        )
        if args.single:
            alone = Workload(work.prompts[:1], [512 if args.shape != "tiny" else 128], work.temperature)
            median, spread = rate(engine, alone, args)
            report(
                "single_sequence_tokens_per_s",
                median,
                "tokens/s",
                spread=spread,
                peer=name if peer and peer.single_tokens_per_s else None,
                peer_value=peer.single_tokens_per_s if peer else None,
                limit=round(alone.output_tokens / least_seconds(shape, alone, ceilings, itemsize), 1),
            )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the engine runs (cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="model shape and workload (tiny)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs after the warm-up (3)")
    parser.add_argument("--cpu-threads", type=int, default=None, help="intra-op threads (all cores)")
    parser.add_argument("--chunked-prefill-size", type=int, default=2048, help="prompt tokens in one step (2048)")
    parser.add_argument("--no-logprobs", action="store_true", help="do not return log-probabilities")
    parser.add_argument("--single", action="store_true", help="also measure one sequence alone")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    run = {
        "command": "python -m benchmarks.offline " + " ".join(sys.argv[1:] if argv is None else argv),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU",
        "repeats": args.repeats,
    }
    print(json.dumps({"name": "run", **run}), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()
