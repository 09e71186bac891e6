"""Offline throughput of another project's engine behind this project's front, and alone, by turns in one command.

    python -m benchmarks.front_cost --device cuda --engine sglang --shape 0.6b
    python -m benchmarks.front_cost --device cuda --engine vllm --shape 8b --rounds 2

A round runs `benchmarks.offline --set engine=NAME` and `benchmarks.peers.NAME_offline`, each as a process that starts
the engine, and ends before the other one starts. Every second round runs them in the other order. Both run the same
requests with the same temperature and dtype, at most 256 at once, without prefix cache and log-probabilities, and both
may use the same share of the GPU's memory. The last of `--runs` runs of each process counts.

All lines of both are printed with `side` ("front" or "alone") and `round`. The last line is `front_ratio`: the median
rate behind the front divided by the median rate alone. The goal is 0.97.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.options import report
from benchmarks.shapes import SHAPES

_GOAL = 0.97
_FIGURE = "output_tokens_per_s"


def run_side(args: argparse.Namespace, side: str) -> Iterator[dict[str, Any]]:
    """Run one process, and yield its lines. Raises CalledProcessError or TimeoutExpired, with stderr passed on."""
    own = ["benchmarks.offline", "--set", f"engine={args.engine}", "--set", f"mem_fraction_static={args.memory}"]
    other = [f"benchmarks.peers.{args.engine}_offline", "--memory", str(args.memory)]
    command = [args.peer_python if side == "alone" else sys.executable, "-m", *(own if side == "front" else other)]
    command += ["--device", args.device, "--shape", args.shape, "--runs", str(args.runs), "--no-logprobs"]
    if args.uniform:
        command += ["--uniform", *map(str, args.uniform)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.bound, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):  # another project may print to stdout
            yield json.loads(line)


def benchmark(args: argparse.Namespace) -> float:
    """Run the rounds, report, and return the ratio."""
    rates: dict[str, list[float]] = {"front": [], "alone": []}
    for number in range(args.rounds):
        for side in list(rates)[:: -1 if number % 2 else 1]:
            for line in run_side(args, side):
                print(json.dumps(line | {"side": side, "round": number + 1}), flush=True)
                if line.get("name") == _FIGURE:
                    rates[side].append(line["value"])
    front, alone = (statistics.median(values) for values in rates.values())
    more = {"front_rates": rates["front"], "alone_rates": rates["alone"], "engine": args.engine, "shape": args.shape}
    report("front_ratio", front / alone, "of the engine alone", goal=_GOAL, **more)
    return front / alone


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.front_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the engine runs (cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="shape of the model (tiny)")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="sglang", help="engine (sglang)")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each of the two (1)")
    parser.add_argument("--runs", type=int, default=3, help="runs of the workload after each start (3)")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory (0.85)")
    parser.add_argument("--bound", type=float, default=300.0, help="most seconds of one process (300)")
    parser.add_argument("--peer-python", default=sys.executable, help="Python of the engine alone (this one)")
    parser.add_argument(
        "--uniform",
        type=int,
        nargs=3,
        metavar=("COUNT", "PROMPT", "OUTPUT"),
        help="use COUNT requests with PROMPT and OUTPUT tokens each instead of the workload",
    )
    args = parser.parse_args(argv)
    if min(args.rounds, args.runs) < 1:
        parser.error("--rounds and --runs must be at least 1.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    print(json.dumps({"name": "run", "command": " ".join(["python -m benchmarks.front_cost", *given])}), flush=True)
    benchmark(args)


if __name__ == "__main__":
    main()
