"""Offline throughput of several engines at once, each in a process and on GPUs of its own.

    python -m benchmarks.replicas --device cpu --shape tiny
    python -m benchmarks.replicas --device cuda --shape 8b --replicas 2

Every engine runs the whole workload of `benchmarks.offline`. All engines begin a run together, and the figure counts
the tokens of all engines until the last one has ended. `limit` is the sum of the engines' limits, each by the ceilings
of its own GPUs. On the CPU, the engines share one machine, so the limit is that of one engine. The last of `--runs`
runs is the figure. `one_engine_tokens_per_s` is the mean rate of an engine while the others run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from torch import multiprocessing

from benchmarks.offline import limit_of, run_once, workload_of
from benchmarks.offline import parse_args as parse_offline
from benchmarks.options import engine_settings, measured_ceilings, report, report_run
from benchmarks.shapes import shape_folder
from verl_server import Engine

_START_SECONDS = 300.0
_RUN_SECONDS = 300.0


def run_replica(replica: int, args: argparse.Namespace, folder: Path, together: Barrier, results: Connection) -> None:
    """Run the workload on the engine `replica`, and send (limit, [(start, end) of each run])."""
    try:
        results.send(measure_replica(replica, args, folder, together))
    except BaseException:
        together.abort()  # so that the other replicas do not wait for this one
        raise


def measure_replica(
    replica: int, args: argparse.Namespace, folder: Path, together: Barrier
) -> tuple[float, list[tuple[float, float]]]:
    first = dict(args.settings).get("base_gpu_id", 0)
    args.settings = [*args.settings, ("base_gpu_id", first + replica * args.tp)]
    work = workload_of(args)
    limit = limit_of(args, work, measured_ceilings(args))
    settings: dict[str, Any] = {"disable_radix_cache": not args.prefix_cache, "max_running_requests": 256}
    runs = []
    with Engine(**engine_settings(args, folder, **settings)) as engine:
        together.wait(_START_SECONDS)
        for _ in range(args.runs):
            if args.prefix_cache:
                engine.flush_cache(timeout=10)
            together.wait(_RUN_SECONDS)
            start = time.monotonic()
            run_once(engine, work, args.logprobs)
            runs.append((start, time.monotonic()))
    return limit, runs


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(args.replicas)
    ends = [context.Pipe(duplex=False) for _ in range(args.replicas)]
    processes = [
        context.Process(target=run_replica, args=(replica, args, folder, together, send))
        for replica, (_, send) in enumerate(ends)
    ]
    try:
        for process, (_, send) in zip(processes, ends, strict=True):
            process.start()
            send.close()  # so that the end of the process ends the wait below
        found = [receive.recv() for receive, _ in ends]
    except EOFError:
        raise SystemExit("A replica ended before its last run: its error is above.") from None
    finally:
        together.abort()
        for process in processes:
            process.join()
    report_runs(args, found)


def report_runs(args: argparse.Namespace, found: list[tuple[float, list[tuple[float, float]]]]) -> None:
    """Report the rates. `found`: (limit, [(start, end) of each run]) of each engine, on the clock of the host."""
    limits = [limit for limit, _ in found]
    tokens = workload_of(args).output_tokens
    for number in range(args.runs):
        spans = [runs[number] for _, runs in found]
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
        rate = args.replicas * tokens / seconds
        report("output_tokens_per_s_run", rate, "tokens/s", run=number + 1, seconds=round(seconds, 4))
    limit = sum(limits) if args.device == "cuda" else max(limits)
    report("output_tokens_per_s", rate, "tokens/s", limit=round(limit, 1), replicas=args.replicas)
    alone = [tokens / (end - start) for start, end in spans]
    rates = [round(each, 1) for each in alone]
    report("one_engine_tokens_per_s", sum(alone) / len(alone), "tokens/s", each=rates, limit=round(min(limits), 1))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other options are those of `python -m benchmarks.offline`, for each engine.",
    )
    own.add_argument("--replicas", type=int, default=2, help="number of engines (2)")
    mine, others = own.parse_known_args(argv)
    args = parse_offline(others)
    args.replicas = mine.replicas
    if args.replicas < 1 or args.single or args.sampling:
        own.error("--replicas must be at least 1, and --single and --sampling are options of benchmarks.offline.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.replicas", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()
