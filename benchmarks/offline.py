"""Offline throughput of `Engine` in this process, with the whole workload submitted at once.

    python -m benchmarks.offline --device cpu --shape tiny
    python -m benchmarks.offline --device cuda --shape 8b --single
    python -m benchmarks.offline --device cuda --shape 0.6b --prefix-cache --logprobs --set disable_cuda_graph=true
    python -m benchmarks.offline --device cuda --shape 0.6b --prefix-cache --samples 16 --uniform 256 1024 1024
    python -m benchmarks.offline --device cuda --shape 0.6b --sampling top_p repetition_penalty
    python -m benchmarks.offline --device cuda --shape 0.6b --works decode_8=8x128x512 prefill=32x1024x1

The model has random weights in the shape of a Qwen3, and the requests are those of `benchmarks/workload.py`. As in the
measurements of the peers, the prefix cache is off, and log-probabilities are off except for `tiny`, whose peer returned
them; both have a switch. Each run is reported, and the last run is the figure, so `--runs 2` reports a warm second run.

`limit` is the rate that the ceilings of this machine allow, which one matrix product and one copy measure in the same
run on each GPU that the engine uses. It assumes that prefill takes the time of its arithmetic. Decode takes the larger
of two times: that of its arithmetic, and that of its memory traffic (weights once a step, keys and values once a
token). With `--tp N` the limit is that of N GPUs, each with its part of the weights, keys and values.

`--sampling` adds settings of `benchmarks.rl_shapes` in the same engine, each with the rate of plain sampling beside it.
`--works` runs named workloads in one engine instead, `benchmarks.card_table` and `benchmarks.smaller_cards` use it. The
rate of a workload with one output token each counts prompt tokens.

On a GPU, `cuda_graphs` is the number of captured graphs at the end, of the rank with the fewest, and
`decode_cuda_graphs` that of steps that only decode. `kv_cache_tokens` is the capacity of the KV cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import (
    engine_settings,
    gpus_of,
    make_parser,
    measured_ceilings,
    report,
    report_capacity,
    report_graphs,
    report_run,
    wait_for_graphs,
)
from benchmarks.rl_shapes import SETTINGS, report_settings
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workload import (
    WORK_SYNTAX,
    Ceilings,
    NamedWork,
    Workload,
    least_seconds,
    make_workload,
    parse_work,
    peer_of,
    single_sequence,
    uniform_workload,
)
from verl_server import Engine

_SAMPLED = uniform_workload(256, 64, 256)
"""The work of each of `--sampling`, unless `--requests` limits all work."""


def run_once(engine: Engine, work: Workload, logprobs: bool) -> float:
    """Seconds for the whole workload when it is submitted at once."""
    start = time.perf_counter()
    results = engine.generate(input_ids=work.prompts, sampling_params=work.sampling_params(), return_logprob=logprobs)
    seconds = time.perf_counter() - start
    lengths = [len(result["output_ids"]) for result in results]
    assert lengths == work.output_lens, "the engine did not generate the requested number of tokens"
    if logprobs:
        assert all(len(r["meta_info"]["output_token_logprobs"]) == len(r["output_ids"]) for r in results)
    return seconds


def measure(
    engine: Engine,
    name: str,
    work: Workload,
    args: argparse.Namespace,
    ceilings: Ceilings | None,
    runs: int | None = None,
) -> float:
    """Report each of `runs` runs (`--runs`). Returns the tokens per second of the last one (`Workload.counted`)."""
    modes = {"prefix_cache": args.prefix_cache, "logprobs": args.logprobs}
    tokens, unit = work.counted
    rates = []
    for run in range(1, (runs or args.runs) + 1):
        if args.prefix_cache:
            engine.flush_cache(timeout=10)  # so that a run hits its own prompts only, not those of the run before
        seconds = run_once(engine, work, args.logprobs)
        rates.append(tokens / seconds)
        report(f"{name}_run", rates[-1], unit, run=run, seconds=round(seconds, 4), **modes)
    as_measured = args.requests is None and args.uniform is None and args.samples == 1 and not args.works
    peer = peer_of(args.device, args.shape, name, gpus=args.tp) if as_measured else {}
    limit = {} if ceilings is None else {"limit": round(limit_of(args, work, ceilings), 1)}
    report(name, rates[-1], unit, **modes, **peer, **limit)
    return rates[-1]


def limit_of(args: argparse.Namespace, work: Workload, ceilings: Ceilings) -> float:
    """Tokens per second (`Workload.counted`) that the ceilings allow for an engine of `--tp` ranks."""
    itemsize, gpus = (2, len(gpus_of(args))) if args.device == "cuda" else (4, 1)
    return work.counted[0] / least_seconds(SHAPES[args.shape], work, ceilings, itemsize, gpus)


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that the options name."""
    work = uniform_workload(*args.uniform) if args.uniform else make_workload(args.shape).first(args.requests)
    return work.in_groups(args.samples)


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    work = workload_of(args)
    ceilings = None
    if args.ceilings:
        ceilings = measured_ceilings(args)
        report("gemm_ceiling", ceilings.flop_per_s / 1e9, "GFLOP/s")
        report("copy_ceiling", ceilings.bytes_per_s / 1e9, "GB/s")
    settings: dict[str, Any] = {"disable_radix_cache": not args.prefix_cache, "max_running_requests": 256}
    start = time.perf_counter()
    with Engine(**engine_settings(args, folder, **settings)) as engine:
        ready = time.perf_counter() - start
        report("seconds_to_ready", ready, "s", **peer_of(args.device, args.shape, "seconds_to_ready", gpus=args.tp))
        if args.all_graphs:
            wait_for_graphs(engine)
        for name, each, runs in args.works or [NamedWork("output_tokens_per_s", work)]:
            measure(engine, name, each, args, ceilings, runs)
        if args.single:
            measure(engine, "single_sequence_tokens_per_s", single_sequence(args.shape), args, ceilings)
        if args.sampling:
            report_settings(engine, _SAMPLED if args.requests is None else work, args.sampling, args.runs)
        report_graphs(engine)
        report_capacity(engine)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.offline", __doc__)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--runs", type=int, default=2, help="runs of the workload; the last run is the figure (2)")
    parser.add_argument("--requests", type=int, help="number of requests, repeating the workload if needed (its own)")
    parser.add_argument(
        "--uniform",
        type=int,
        nargs=3,
        metavar=("COUNT", "PROMPT", "OUTPUT"),
        help="use COUNT requests with PROMPT and OUTPUT tokens each instead of the workload",
    )
    parser.add_argument("--samples", type=int, default=1, help="consecutive requests with one prompt, as in GRPO (1)")
    parser.add_argument("--prefix-cache", action=switch, default=False, help="share prefixes between requests (no)")
    parser.add_argument("--logprobs", action=switch, help="return log-probabilities (no; tiny: yes)")
    parser.add_argument(
        "--single", action="store_true", help="also measure a single sequence of 512 tokens (tiny: 128)"
    )
    parser.add_argument(
        "--sampling", nargs="+", choices=list(SETTINGS), default=[], help="also measure these sampling settings (none)"
    )
    parser.add_argument(
        "--works",
        nargs="+",
        type=parse_work,
        default=[],
        metavar=WORK_SYNTAX,
        help="run these workloads in one engine instead of the workload",
    )
    parser.add_argument(
        "--all-graphs", action="store_true", help="begin when all CUDA graphs are captured (when the engine is ready)"
    )
    parser.add_argument(
        "--ceilings", action=switch, default=True, help="measure the limits first; takes 0.5 GB of the GPU (yes)"
    )
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error("--samples must be at least 1")
    if args.logprobs is None:
        args.logprobs = args.shape == "tiny"
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.offline", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()
