"""How much slower an engine's first run is than its second: on a bare machine, and in a fresh process on a warm one.

    python -m benchmarks.first_minute --device cpu --shape tiny
    python -m benchmarks.first_minute --device cuda --shape 0.6b

Each start is a new Python program (`benchmarks/first_runs.py`) that runs the workload of `benchmarks.offline` twice,
the first time as soon as the engine is ready. The start `bare` has an empty Triton cache (TRITON_CACHE_DIR is a folder
that is removed afterwards). Then `warm` starts with the cache that `bare` filled. With `--ahead` a third start,
`ahead`, has a cache that `verl-server warm-up` filled, as in a container image.

For each start: `ready` is the time from the program's first line to the end of the engine's start. `ratio` is the
tokens per second of the first run divided by those of the second. `kernels_compiled` are the Triton kernels that the
engine's process had to compile itself. Goals on a GPU: a ratio of 0.6 on a bare machine and of 0.9 on a warm one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import shape_folder

GOALS = {"bare": 0.6, "warm": 0.9, "ahead": 0.9}


def run_twice(args: argparse.Namespace, folder: Path, cache: Path) -> dict[str, Any]:
    """Start the program with the Triton cache `cache` and return its line."""
    settings = engine_settings(args, folder, disable_radix_cache=True, max_running_requests=256)
    given = {"settings": settings, "shape": args.shape, "requests": args.requests}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_runs"],
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        timeout=args.bound,
        check=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
    )
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def warm_up(args: argparse.Namespace, folder: Path, cache: Path) -> float:
    """Fill the cache with `verl-server warm-up`. Return the seconds that it takes."""
    settings = engine_settings(args, folder, disable_radix_cache=True, max_running_requests=256)
    command = [sys.executable, "-m", "verl_server", "warm-up"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    start = time.monotonic()
    env = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=args.bound, check=True, env=env)
    return time.monotonic() - start


def report_start(name: str, args: argparse.Namespace, folder: Path, cache: Path) -> None:
    line = run_twice(args, folder, cache)
    rates = [line["tokens"] / seconds for seconds in line["runs"]]
    report(f"{name}_ready", line["ready"], "s")
    for run, rate in enumerate(rates, 1):
        report(f"{name}_run", rate, "tokens/s", run=run)
    figures = {key: line["memory"].get(key) for key in ("kernels_compiled", "cuda_graphs", "cuda_graphs_to_capture")}
    goal = {"goal": GOALS[name]} if args.device == "cuda" else {}
    report(f"{name}_ratio", rates[0] / rates[1], "of the second run", **goal, **figures)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.first_minute", __doc__)
    parser.add_argument("--requests", type=int, help="number of requests (those of the workload)")
    parser.add_argument("--bound", type=float, default=300.0, help="largest seconds of one start with its runs (300)")
    parser.add_argument("--ahead", action="store_true", help="also start with a cache that warm-up filled")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.first_minute", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(Path(temporary, "model"), args.shape)
        cache = Path(temporary, "triton")
        for name in ("bare", "warm"):
            report_start(name, args, folder, cache)
        if args.ahead:
            cache = Path(temporary, "ahead")
            report("warm_up_seconds", warm_up(args, folder, cache), "s")
            report_start("ahead", args, folder, cache)


if __name__ == "__main__":
    main()
