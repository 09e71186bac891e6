"""The common part of the scripts in this folder: command line, runs of the offline workload, and JSON lines."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workload import (
    WORK_SYNTAX,
    NamedWork,
    Workload,
    make_workload,
    parse_work,
    single_sequence,
    uniform_workload,
)

Generate = Callable[[Workload], list[int]]
"""Runs a workload that is submitted at once, and returns the number of tokens of each output."""
Start = Callable[[Path, argparse.Namespace], AbstractContextManager[Generate]]
"""Starts the other engine with a model folder; the end of the context stops it."""


def run_peer(package: str, doc: str | None, start: Start) -> None:
    """Measure another engine in the same way as `benchmarks.offline`."""
    args = parse_args(doc)
    version = importlib.import_module(package).__version__  # the distribution of vLLM's CPU build has another name
    peer = {"peer": f"{package} {version}", "prefix_cache": args.prefix_cache, "logprobs": args.logprobs}
    print(json.dumps({"name": "run", "command": " ".join(sys.argv), "torch": torch.__version__} | peer), flush=True)
    weights = args.weights == "written"
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(temporary, args.shape, weights=weights, dtype=dtype)
        began = time.perf_counter()
        with start(folder, args) as generate:
            _report("seconds_to_ready", time.perf_counter() - began, "s", peer)
            work = uniform_workload(*args.uniform) if args.uniform else make_workload(args.shape)
            for name, each, runs in args.works or [NamedWork("output_tokens_per_s", work)]:
                _measure(name, generate, each, runs or args.runs, peer)
            if args.single:
                _measure("single_sequence_tokens_per_s", generate, single_sequence(args.shape), args.runs, peer)


def _measure(name: str, generate: Generate, work: Workload, runs: int, peer: dict[str, object]) -> None:
    tokens, unit = work.counted
    for _ in range(runs):
        start = time.perf_counter()
        lengths = generate(work)
        rate = tokens / (time.perf_counter() - start)
        assert lengths == work.output_lens, "the peer did not generate the requested number of tokens"
        _report(f"{name}_run", rate, unit, peer)
    _report(name, rate, unit, peer)


def _report(name: str, value: float, unit: str, peer: dict[str, object]) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit} | peer), flush=True)


def parse_args(doc: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where the engine runs (cuda)")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="0.6b", help="shape of the model, which decides the workload (0.6b)"
    )
    parser.add_argument("--runs", type=int, default=2, help="runs of the workload; the last run is the figure (2)")
    parser.add_argument("--single", action="store_true", help="also measure a single sequence")
    parser.add_argument("--logprobs", action=switch, default=False, help="return log-probabilities (no)")
    parser.add_argument("--prefix-cache", action=switch, default=False, help="share prefixes between requests (no)")
    parser.add_argument(
        "--uniform",
        type=int,
        nargs=3,
        metavar=("COUNT", "PROMPT", "OUTPUT"),
        help="use COUNT requests with PROMPT and OUTPUT tokens each instead of the workload",
    )
    parser.add_argument(
        "--works",
        nargs="+",
        type=parse_work,
        default=[],
        metavar=WORK_SYNTAX,
        help="run these workloads in one engine instead of the workload",
    )
    parser.add_argument("--memory", type=float, help="share of the GPU's memory (that of the engine)")
    parser.add_argument(
        "--weights",
        choices=["dummy", "written"],
        default="dummy",
        help="dummy: the engine draws random weights; written: a folder with random weights (dummy)",
    )
    return parser.parse_args(argv)
