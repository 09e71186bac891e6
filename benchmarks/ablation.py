"""The gain of each optimization: the offline workload with one optimization switched off at a time.

    python -m benchmarks.ablation --device cuda --shape 0.6b
    python -m benchmarks.ablation --device cuda --shape 8b --only disable_cuda_graph fused_kernels

Prints one line per engine: `value` in tokens/s, and `ratio` to the reference engine, which has every optimization on,
the prefix cache off and no log-probabilities. The first line is the reference engine; the last line is the same engine
again, which shows how much the measurement varies. The lines `logprobs` and `prefix_cache` show the cost of these two
features, which RL needs. Switches without an effect on the device are left out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.offline import run_once
from benchmarks.options import engine_settings, make_parser, report, report_run, switches
from benchmarks.shapes import shape_folder
from benchmarks.workload import Workload, make_workload
from verl_server import Engine

_BASE = "everything"
_FEATURES: dict[str, Any] = {"logprobs": True, "prefix_cache": True}
_ON_CPU = ("fused_kernels", "attention_backend")


def variants() -> dict[str, dict[str, Any]]:
    """Name of a line -> settings of that engine that differ from the reference engine."""
    return {name: {name: value} for name, value in (switches() | _FEATURES).items()}


def usual(args: argparse.Namespace) -> list[str]:
    """The variants that have an effect on this device and with this number of ranks."""
    if args.device == "cpu":
        return [name for name in variants() if name in _FEATURES or name in _ON_CPU]
    return [name for name in variants() if args.tp > 1 or name != "disable_custom_all_reduce"]


def measure(args: argparse.Namespace, folder: Path, work: Workload, different: dict[str, Any]) -> float:
    """Output tokens per second in the last of `--runs` runs of one engine."""
    settings = engine_settings(args, folder, disable_radix_cache=not different.get("prefix_cache"))
    settings |= {name: value for name, value in different.items() if name not in _FEATURES}
    with Engine(**settings) as engine:
        for _ in range(args.runs):
            if different.get("prefix_cache"):
                engine.flush_cache(timeout=10)
            seconds = run_once(engine, work, logprobs=bool(different.get("logprobs")))
    return work.output_tokens / seconds


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    work = make_workload(args.shape).first(args.requests)
    base = measure(args, folder, work, {})
    report(_BASE, base, "tokens/s", ratio=1.0)
    for name in args.only or usual(args):
        different = variants()[name]
        value = measure(args, folder, work, different)
        report(name, value, "tokens/s", set=different[name], ratio=round(value / base, 4))
    again = measure(args, folder, work, {})
    report(f"{_BASE}_again", again, "tokens/s", ratio=round(again / base, 4))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.ablation", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(variants()), help="the variants to run, in this order (all)")
    parser.add_argument("--runs", type=int, default=2, help="runs of each engine; the last run is reported (2)")
    parser.add_argument("--requests", type=int, help="number of requests, repeating the workload if needed (its own)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.ablation", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()
