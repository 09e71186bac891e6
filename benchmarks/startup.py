"""Seconds from the start of a process to its first token.

    python -m benchmarks.startup --device cpu --shape tiny --weights dummy safetensors
    python -m benchmarks.startup --device cuda --shape 8b

Each run is a fresh Python program (`benchmarks/first_token.py`) that makes an `Engine`, asks for one token and then for
16. `--weights dummy` draws random weights, `safetensors` reads a folder that is written before the clock starts, and so
comes from the page cache. One line per run, with its phases in seconds: `interpreter` (until the program's first line),
`imports`, `engine` (the constructor: processes, weights, KV cache), `token` (the first), `decode` (16 more, with what
they capture or compile). Of `--runs` runs, the last is the figure: what the first had to compile is cached by then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import shape_folder
from benchmarks.workload import peer_of

_PHASES = {
    "interpreter": "entered",
    "imports": "imported",
    "engine": "ready",
    "token": "first_token",
    "decode": "first_16_tokens",
}


def start_once(settings: dict[str, Any], bound: float) -> dict[str, float]:
    """Phase -> seconds of one start. Raises CalledProcessError or TimeoutExpired if it fails."""
    start = time.monotonic()
    program = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_token"],
        input=json.dumps(settings),
        stdout=subprocess.PIPE,
        text=True,
        timeout=bound,
        check=True,
    )
    moments = json.loads(program.stdout.splitlines()[-1])
    times = [start, *(moments[name] for name in _PHASES.values())]
    return {phase: later - earlier for phase, (earlier, later) in zip(_PHASES, pairwise(times), strict=True)}


def benchmark(args: argparse.Namespace, folder: Path, weights: str) -> None:
    load_format = "dummy" if weights == "dummy" else "safetensors"
    settings = engine_settings(args, folder, load_format=load_format)
    for run in range(1, args.runs + 1):
        phases = start_once(settings, args.bound)
        value = sum(phases.values()) - phases["decode"]
        rounded = {name: round(seconds, 3) for name, seconds in phases.items()}
        report("seconds_to_first_token_run", value, "s", run=run, weights=weights, **rounded)
    peer = peer_of(args.device, args.shape, "seconds_to_ready") if weights == "dummy" else {}
    report("seconds_to_first_token", value, "s", weights=weights, **peer)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.startup", __doc__)
    parser.add_argument("--runs", type=int, default=2, help="starts; the last is the figure (2)")
    parser.add_argument("--bound", type=float, default=600.0, help="most seconds for one start (600)")
    parser.add_argument(
        "--weights", choices=["dummy", "safetensors"], nargs="+", default=["dummy"], help="where they come from (dummy)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.startup", args, argv)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    for weights in args.weights:
        with tempfile.TemporaryDirectory() as temporary:
            folder = shape_folder(temporary, args.shape, weights=weights == "safetensors", dtype=dtype)
            benchmark(args, folder, weights)


if __name__ == "__main__":
    main()
