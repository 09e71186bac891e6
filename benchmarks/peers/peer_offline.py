"""The offline workload with another engine: command line, runs and JSON lines that the peers' scripts share."""

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
from benchmarks.workload import Workload, make_workload, single_sequence, uniform_workload

Generate = Callable[[Workload], list[int]]
"""Runs a workload, all of it submitted at once, and returns the number of tokens of each output."""
Start = Callable[[Path, argparse.Namespace], AbstractContextManager[Generate]]
"""Makes the peer's engine for a model folder, and ends it."""


def run_peer(package: str, doc: str | None, start: Start) -> None:
    """Measure the peer as `benchmarks.offline` measures ours."""
    args = parse_args(doc)
    version = importlib.import_module(package).__version__  # vLLM's CPU build is a distribution of another name
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
            _measure("output_tokens_per_s", generate, work, args.runs, peer)
            if args.single:
                _measure("single_sequence_tokens_per_s", generate, single_sequence(args.shape), args.runs, peer)


def _measure(name: str, generate: Generate, work: Workload, runs: int, peer: dict[str, object]) -> None:
    for _ in range(runs):
        start = time.perf_counter()
        lengths = generate(work)
        rate = work.output_tokens / (time.perf_counter() - start)
        assert lengths == work.output_lens, "the peer did not generate what was asked"
        _report(f"{name}_run", rate, "tokens/s", peer)
    _report(name, rate, "tokens/s", peer)


def _report(name: str, value: float, unit: str, peer: dict[str, object]) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit} | peer), flush=True)


def parse_args(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where it runs (cuda)")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="0.6b", help="model shape, and with it the work (0.6b)"
    )
    parser.add_argument("--runs", type=int, default=2, help="runs; the last is the figure (2)")
    parser.add_argument("--single", action="store_true", help="also one sequence alone")
    parser.add_argument("--logprobs", action=switch, default=False, help="return log-probabilities (no)")
    parser.add_argument("--prefix-cache", action=switch, default=False, help="share prefixes (no)")
    parser.add_argument(
        "--uniform", type=int, nargs=3, metavar=("COUNT", "PROMPT", "OUTPUT"), help="one length instead"
    )
    parser.add_argument(
        "--weights", choices=["dummy", "written"], default="dummy", help="made by the peer, or a folder"
    )
    return parser.parse_args()
