"""Seconds from the start of a process to its first token.

    python -m benchmarks.startup --device cpu --shape tiny --weights dummy safetensors
    python -m benchmarks.startup --device cuda --shape 8b

Each run is a new Python program (`benchmarks/first_token.py`) that creates an `Engine`, generates one token and then 16
tokens. `--weights dummy` draws random weights. `safetensors` reads a folder that is written before the clock starts, so
the files are in the page cache. The last of `--runs` runs is the figure: by then, everything that the first run had to
compile is cached.

Prints one line per phase, then one line per run. A phase has its seconds (`value`) and the time at which it ended
(`at`). The phases, in this order: `interpreter` (until the first line of the program), `imports` (of the program),
`spawn` (until the first line of the scheduler process), `scheduler_imports` (torch and this package), `device` (the
rest of the CUDA context's creation, which begins during the imports), `weights`, `kv_cache`, `scheduler_ready`
(attention, graphs), `ready` (the remaining wait of the front process), `first_token`, and `first_16_tokens`, which
includes captures and compilations of these tokens and is not part of the figure. `limit` is the time of a bare program
that imports torch, creates a context on the device and runs one kernel: the median of one before each run.

With `--served`, the benchmark times `verl-server serve` until it prints that it is ready, including tokenizer, HTTP and
warm-up request. These runs alternate with runs of a Python program that only imports torch. The figure is the median,
with its ratio to the median time of the import.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import shape_folder
from benchmarks.workload import peer_of

_PHASES = {
    "interpreter": "entered",
    "imports": "imported",
    "spawn": "scheduler_entered",
    "scheduler_imports": "scheduler_imports",
    "device": "scheduler_device",
    "weights": "scheduler_weights",
    "kv_cache": "scheduler_kv_cache",
    "scheduler_ready": "scheduler_ready",
    "ready": "ready",
    "first_token": "first_token",
    "first_16_tokens": "first_16_tokens",
}
"""Phase -> key of the time at which it ended, in the output of `benchmarks.first_token`."""


def start_once(settings: dict[str, Any], bound: float) -> dict[str, float]:
    """Start the program once. Returns phase -> seconds from the start of the program to the end of the phase.

    Raises CalledProcessError or TimeoutExpired if the program fails.
    """
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
    return {phase: moments[name] - start for phase, name in _PHASES.items()}


def start_bare(device: str, bound: float) -> float:
    """Seconds of a Python program that imports torch, creates a context on the device and runs one kernel."""
    code = f"import torch; print(torch.ones(1, device={device!r}).add_(1).item())"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=bound, check=True)
    return time.monotonic() - start


def import_torch(bound: float) -> float:
    """Seconds of a Python program that only imports torch."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], timeout=bound, check=True)
    return time.monotonic() - start


def serve_once(args: argparse.Namespace, folder: Path, load_format: str) -> float:
    """Seconds from the start of `verl-server serve` until it is ready. Raises RuntimeError if it ends before that."""
    command = [sys.executable, "-m", "verl_server", "serve", "--port", "0", "--device", args.device]
    command += ["--model-path", str(folder), "--load-format", load_format, "--tp-size", str(args.tp)]
    for name, value in args.settings:
        command += [f"--{name.replace('_', '-')}", str(value)]
    start = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        bound = threading.Timer(args.bound, server.kill)
        bound.start()
        try:
            lines = []
            for line in server.stderr:
                if line.startswith("Ready: "):
                    return time.monotonic() - start
                lines.append(line)
            code = server.wait()
            raise RuntimeError(f"verl-server exited with code {code} before it was ready: {''.join(lines[-20:])}")
        finally:
            bound.cancel()
            server.terminate()
            server.stderr.read()


def benchmark_served(args: argparse.Namespace, folder: Path, weights: str) -> None:
    imports, starts = [], []
    for run in range(1, args.runs + 1):
        imports.append(import_torch(args.bound))
        starts.append(serve_once(args, folder, "dummy" if weights == "dummy" else "safetensors"))
        report("seconds_to_serve_run", starts[-1], "s", run=run, weights=weights, import_torch=round(imports[-1], 3))
    value, limit = statistics.median(starts), statistics.median(imports)
    report("seconds_to_serve", value, "s", weights=weights, limit=round(limit, 3), ratio=round(value / limit, 3))


def benchmark(args: argparse.Namespace, folder: Path, weights: str) -> None:
    load_format = "dummy" if weights == "dummy" else "safetensors"
    settings = engine_settings(args, folder, load_format=load_format)
    bare = []
    for run in range(1, args.runs + 1):
        bare.append(start_bare(args.device, args.bound))
        ends = start_once(settings, args.bound)
        for phase, before in zip(ends, [0.0, *ends.values()], strict=False):
            at = round(ends[phase], 3)
            report(f"start_{phase}", ends[phase] - before, "s", run=run, weights=weights, at=at)
        value = ends["first_token"]
        report("seconds_to_first_token_run", value, "s", run=run, weights=weights)
    peer = peer_of(args.device, args.shape, "seconds_to_ready", gpus=args.tp) if weights == "dummy" else {}
    report("seconds_to_first_token", value, "s", weights=weights, **peer, limit=round(statistics.median(bare), 3))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.startup", __doc__)
    parser.add_argument("--runs", type=int, default=2, help="number of starts; the last one is the figure (2)")
    parser.add_argument("--bound", type=float, default=600.0, help="largest seconds of one start (600)")
    parser.add_argument(
        "--weights", choices=["dummy", "safetensors"], nargs="+", default=["dummy"], help="source of weights (dummy)"
    )
    parser.add_argument(
        "--served", action="store_true", help="time `verl-server serve` and compare it with `import torch`"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.startup", args, argv)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    for weights in args.weights:
        with tempfile.TemporaryDirectory() as temporary:
            folder = shape_folder(temporary, args.shape, weights=weights == "safetensors", dtype=dtype)
            (benchmark_served if args.served else benchmark)(args, folder, weights)


if __name__ == "__main__":
    main()
