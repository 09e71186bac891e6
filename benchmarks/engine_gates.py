"""Run all benchmarks of the engine's speed in one command. Each one is bounded, resumable, and compared with limits.

    python -m benchmarks.engine_gates --device cuda --out runs/gates.jsonl
    python -m benchmarks.engine_gates --device cuda --out runs/gates.jsonl --seconds 560
    python -m benchmarks.engine_gates --device cuda --out runs/gates.jsonl --only serving_0.6b multi_turn_0.6b
    python -m benchmarks.engine_gates --device cuda --out runs/gates.jsonl --judge

Each part is the command line of a benchmark. It runs as a process of its own and is killed at its bound. Its output
lines are appended to `--out`, with `part` added, followed by a line with `name` "part_end". A part that succeeded
according to the file is not run again unless `--only` names it. With `--seconds`, a part is started only if its bound
ends in time. At the end (with `--judge`, at once) the gates are printed: figures of the file compared with the limits
that we require, with `ok` null if the file lacks a figure. The exit code is 1 if a part failed or a gate is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[tuple[str, str], dict[str, Any]]
"""(part, name of the figure) -> last line of this figure in the file."""


@dataclass(frozen=True)
class Part:
    name: str
    command: str
    """Command line behind `python -m benchmarks.`, without the device."""
    bound: float
    """Seconds after which the process is killed."""


@dataclass(frozen=True)
class Gate:
    """A limit: `value(figures)` must be from `least` to `most`. `value` raises KeyError if a figure is missing."""

    name: str
    value: Callable[[Figures], float]
    least: float | None = None
    most: float | None = None

    def judge(self, figures: Figures) -> dict[str, Any]:
        line: dict[str, Any] = {"name": "gate", "gate": self.name, "least": self.least, "most": self.most}
        try:
            value = self.value(figures)
        except KeyError as missing:
            return line | {"value": None, "ok": None, "missing": missing.args[0]}
        ok = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return line | {"value": round(value, 4), "ok": ok}


PARTS: dict[str, list[Part]] = {
    "cuda": [
        Part("offline_0.6b", "offline --shape 0.6b --single", 150),
        Part("offline_0.6b_logprobs", "offline --shape 0.6b --logprobs", 120),
        Part("offline_0.6b_both", "offline --shape 0.6b --single --logprobs --prefix-cache", 150),
        Part("offline_8b", "offline --shape 8b --single", 200),
        Part("offline_8b_both", "offline --shape 8b --single --logprobs --prefix-cache", 200),
        Part("startup_8b", "startup --shape 8b --bound 120", 200),
        Part("serving_0.6b", "serving --shape 0.6b --runs 3", 200),
        Part("multi_turn_0.6b", "multi_turn --shape 0.6b --agents 128 --turns 8", 240),
        Part("ablation_0.6b", "ablation --shape 0.6b", 500),
        Part(
            "ablation_8b", "ablation --shape 8b --only disable_cuda_graph disable_overlap_schedule fused_kernels", 500
        ),
    ],
    "cuda_tp2": [
        Part("offline_8b_tp2", "offline --shape 8b --tp 2 --single", 240),
        Part("ablation_8b_tp2", "ablation --shape 8b --tp 2 --only disable_custom_all_reduce disable_cuda_graph", 400),
    ],
    "cpu": [
        Part("offline_tiny", "offline --shape tiny", 200),
        Part("offline_0.6b", "offline --shape 0.6b --uniform 16 64 64 --logprobs", 900),
        Part("startup_tiny", "startup --shape tiny --weights dummy safetensors", 120),
        Part("serving_tiny", "serving --shape tiny", 200),
        Part("multi_turn_tiny", "multi_turn --shape tiny --wait-scale 0.2", 120),
        Part("ablation_tiny", "ablation --shape tiny", 300),
    ],
}


def _figure(part: str, name: str, field: str = "value") -> Callable[[Figures], float]:
    return lambda figures: float(figures[part, name][field])


def _logprob_cost(figures: Figures) -> float:
    with_logprobs, without = (
        _figure(p, "output_tokens_per_s")(figures) for p in ("offline_0.6b_logprobs", "offline_0.6b")
    )
    return 1 - with_logprobs / without


GATES: dict[str, list[Gate]] = {
    "cuda": [
        Gate("0.6B offline, tokens/s", _figure("offline_0.6b", "output_tokens_per_s"), least=24_000),
        Gate("8B offline, tokens/s", _figure("offline_8b", "output_tokens_per_s"), least=9_600),
        Gate("0.6B one sequence, tokens/s", _figure("offline_0.6b", "single_sequence_tokens_per_s"), least=600),
        Gate("8B one sequence, tokens/s", _figure("offline_8b", "single_sequence_tokens_per_s"), least=205),
        Gate("8B start to first token, s", _figure("startup_8b", "seconds_to_first_token"), most=15),
        Gate("cost of log-probabilities, share", _logprob_cost, most=0.03),
        Gate("prefix hits of what could hit", _figure("multi_turn_0.6b", "prefix_hit_rate", "ratio"), least=0.95),
        Gate("lock step to own pace", _figure("multi_turn_0.6b", "lock_step_ratio"), least=3),
        Gate("own pace to the ideal", _figure("multi_turn_0.6b", "ideal_ratio"), most=1.1),
        Gate(
            "HTTP (columns) to in process", _figure("serving_0.6b", "http_columnar_tokens_per_s", "ratio"), least=0.97
        ),
        Gate("HTTP (JSON) to in process", _figure("serving_0.6b", "http_json_tokens_per_s", "ratio"), least=0.97),
    ],
    "cuda_tp2": [Gate("8B on two GPUs, tokens/s", _figure("offline_8b_tp2", "output_tokens_per_s"), least=1)],
    "cpu": [
        Gate("4M parameters, tokens/s", _figure("offline_tiny", "output_tokens_per_s"), least=7_620),
        # vLLM CPU 0.32.0 on both cores of the machine in docs/performance.md. Measure it again beside this figure,
        # because timings on that machine vary.
        Gate("0.6B, 16 x (64 + 64), tokens/s", _figure("offline_0.6b", "output_tokens_per_s"), least=56.4),
    ],
}


def run_part(part: Part, device: str, out: Path) -> bool:
    """Run the part and append its lines to `out`. Returns True if its exit code is 0."""
    start = time.monotonic()
    command = [sys.executable, "-m", *f"benchmarks.{part.command} --device {device}".split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(part.bound, process.kill)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            _write(out, {"part": part.name} | _parsed(line))
        code = process.wait()
        timed_out = not killer.is_alive()
        killer.cancel()
    seconds = round(time.monotonic() - start, 1)
    _write(out, {"part": part.name, "name": "part_end", "code": code, "timed_out": timed_out, "seconds": seconds})
    return code == 0


def _parsed(line: str) -> dict[str, Any]:
    """A line of a benchmark as an object. A line that is not JSON, as a library may print it, becomes a note."""
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return {"name": "note", "text": line.rstrip()}
    return found


def _write(out: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    with out.open("a") as file:
        file.write(text + "\n")


def read_figures(out: Path) -> Figures:
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {(line["part"], line["name"]): line for line in lines}


def parts_to_run(parts: list[Part], only: list[str] | None, figures: Figures) -> list[Part]:
    """The parts that `only` names; without `only`, the parts that have not succeeded yet."""
    if only is not None:
        return [part for part in parts if part.name in only]
    return [part for part in parts if figures.get((part.name, "part_end"), {}).get("code") != 0]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_gates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=list(PARTS), default="cpu", help="set of parts; cuda_tp2 needs 2 GPUs (cpu)"
    )
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, to which lines are appended")
    names = sorted({part.name for parts in PARTS.values() for part in parts})
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"parts to run: {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help="start only parts whose bound ends within this many seconds")
    parser.add_argument("--judge", action="store_true", help="run nothing, only compare the file with the gates")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds if args.seconds else float("inf")
    ok = True
    for part in [] if args.judge else parts_to_run(PARTS[args.device], args.only, read_figures(args.out)):
        if time.monotonic() + part.bound > end:
            print(json.dumps({"part": part.name, "name": "part_left", "bound": part.bound}), flush=True)
            continue
        ok &= run_part(part, args.device.partition("_")[0], args.out)
    verdicts = [gate.judge(read_figures(args.out)) for gate in GATES[args.device]]
    for verdict in verdicts:
        print(json.dumps(verdict), flush=True)
    return 0 if ok and all(verdict["ok"] is not False for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
