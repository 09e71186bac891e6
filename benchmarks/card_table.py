"""One card, three engines: this project's, vLLM and SGLang with the same work, by turns, beside the card's limits.

    python -m benchmarks.card_table --out runs/h100.jsonl --minutes 9.5
    python -m benchmarks.card_table --out runs/h100.jsonl --render h100.md
    python -m benchmarks.card_table --out runs/h100.jsonl --vllm-python /venvs/vllm/bin/python --sglang-python ...
    python -m benchmarks.card_table --out runs/cpu.jsonl --device cpu --shapes tiny --rounds 1

Run it from the root of the repository. Each cell of a round is a process of its own, which starts one engine with one
shape and ends before the next one starts: `benchmarks.offline` for this project's engine, `benchmarks.peers.*_offline`
for an engine that its Python (this one, or --vllm-python, --sglang-python) can import. Every second round is in the
other order. After the first round come the weight pushes: `benchmarks.weight_sync`, and SGLang's own
(`benchmarks.peers.sglang_push`); vLLM has no such call that could be compared.

    decode_1, _8, _64, _256   output tokens/s of so many requests with prompts of 128 and outputs of 512 tokens
    prefill                   prompt tokens/s of 256 prompts of 1,024 tokens with one output token each
    rl                        output tokens/s of 256 requests with prompts and outputs of 1,024 tokens
    push                      milliseconds of a weight push, the median of 10

(`tiny` has fewer and shorter requests.)

Random weights, bf16 (float32 on a CPU), temperature 1, prefix cache and log-probabilities off, 256 requests at once at
most, and --memory of the GPU for each engine. The second of two runs is the figure, for `rl` the only one.

Every line is appended to --out as it is printed. The same command again runs what is missing for this card and these
versions, also single workloads of a cell that was killed; use a new file after a change of the code. The most important
cells come first, and none starts that has too little of --minutes left. --render writes the Markdown table of the file:
medians over the rounds with the least and the largest, the limit, and the ratio to the best other engine.

A host with several equal GPUs runs several rounds at the same time, each on one of them: the second one is

    CUDA_VISIBLE_DEVICES=1 python -m benchmarks.card_table --out runs/second.jsonl --first-round 2 --rounds 1

and the files are then joined into one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.card_rows import OURS, Cell, Kind, Table, render, works_of
from benchmarks.gates.parts import Part
from benchmarks.gates.running import find_card, find_uuids, held_by_others, run_part, write_line
from verl_server import __version__

SHAPES = ("0.6b", "8b", "tiny")
ENGINES = (OURS, "vllm", "sglang")
_CELL_SECONDS = 420.0
_LEAST_SECONDS = {OURS: 60.0, "vllm": 150.0, "sglang": 150.0}
"""Seconds in which an engine starts and measures something. With less time left, its cells do not start."""
_VERSION_SECONDS = 60.0
_FIND_VERSION = (
    "import importlib.metadata as m, importlib.util as u, sys; name = sys.argv[1]; spec = u.find_spec(name); "
    "print(m.version(m.packages_distributions()[name][0]) if spec and spec.origin else '')"
)
_MEMORY = {OURS: "--set mem_fraction_static={}", "vllm": "--memory {}", "sglang": "--memory {}"}
_PUSHES = {
    OURS: "weight_sync --shape {} --updates 10 --warmup 3 --check-every 5",
    "sglang": "peers.sglang_push --shape {}",
}


@dataclass(frozen=True)
class Engine:
    name: str
    version: str
    python: str


def find_engines(args: argparse.Namespace) -> list[Engine]:
    """Return the chosen engines that can be imported. Say on stderr which ones cannot."""
    pythons = {OURS: sys.executable, "vllm": args.vllm_python, "sglang": args.sglang_python}
    found = []
    for name in args.engines:
        version = __version__ if name == OURS else find_version(pythons[name], name)
        if version:
            found.append(Engine(name, version, pythons[name]))
        else:
            progress(f"{name}: {pythons[name]} cannot import it, so it is left out")
    return found


def find_version(python: str, package: str) -> str:
    """Return the version of a package that `python` can import, "" if it cannot. The package is not imported."""
    command = [python, "-c", _FIND_VERSION, package]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_VERSION_SECONDS)
    return done.stdout.strip() if done.returncode == 0 else ""


def all_cells(args: argparse.Namespace, card: str, engines: list[Engine]) -> Iterator[tuple[Engine, Cell]]:
    """The cells in the order in which they run."""

    def of(kind: Kind, shape: str, number: int) -> Iterator[tuple[Engine, Cell]]:
        for engine in engines if number % 2 else reversed(engines):
            if kind == "works" or (kind == "push" and engine.name in _PUSHES):
                yield engine, Cell(card, engine.name, engine.version, shape, kind, number)

    ours = next((engine for engine in engines if engine.name == OURS), None)
    if ours is not None:
        yield ours, Cell(card, ours.name, ours.version, "", "ceilings", 1)
    for number in range(args.first_round, args.first_round + args.rounds):
        for shape in args.shapes:
            yield from of("works", shape, number)
        if number == 1:
            for shape in reversed(args.shapes):
                yield from of("push", shape, number)


def command_of(cell: Cell, missing: list[str], memory: float) -> str:
    """Return the command line behind `python -m benchmarks.`, for the figures that are missing."""
    if cell.kind == "ceilings":
        return "ceilings"
    if cell.kind == "push":
        return _PUSHES[cell.engine].format(cell.shape)
    module = "offline" if cell.engine == OURS else f"peers.{cell.engine}_offline"
    wanted = {*missing, "decode_256"} if missing == ["rl"] else set(missing)  # `rl` needs a warm engine
    works = " ".join(text for name, text in works_of(cell.shape).items() if name in wanted)
    return f"{module} --shape {cell.shape} --no-logprobs {_MEMORY[cell.engine].format(memory)} --works {works}"


def run_cells(args: argparse.Namespace, cells: list[tuple[Engine, Cell]]) -> None:
    """Run what is missing of each cell, as long as there is time. Note what other programs hold of the GPU."""
    deadline = time.monotonic() + 60 * args.minutes
    uuids = find_uuids(1 if args.device == "cuda" else 0)
    for number, (engine, cell) in enumerate(cells, 1):
        table, left = Table.read(args.out), deadline - time.monotonic()
        title = f"{number} of {len(cells)}, {cell.engine} {cell.shape} {cell.kind}, round {cell.round}"
        missing = table.missing(cell)
        if not missing:
            continue
        if left < _LEAST_SECONDS[engine.name]:
            progress(f"{title}: left, {max(left, 0):.0f} s are too few")
            continue
        bound = min(_CELL_SECONDS, left)
        progress(f"{title}: {', '.join(missing)}, at most {bound:.0f} s")
        if cell.part not in table.cells:
            write_line(args.out, cell.line())
        if held := held_by_others(uuids):
            progress(f"{title}: its figures cannot be compared. {held}")
            write_line(args.out, {"part": cell.part, "name": "beside_others", "held": held})
        part = Part(cell.part, command_of(cell, missing, args.memory), bound)
        if not run_part(part, args.device, args.out, python=engine.python):
            progress(f"{title}: FAILED, see part_end in {args.out}")


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, to which lines are appended")
    parser.add_argument("--render", type=Path, metavar="FILE", help="run nothing, write the table of --out to FILE")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where the engines run (cuda)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "8b"], help="shapes (0.6b 8b)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="engines (all)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, by turns (2)")
    parser.add_argument("--first-round", type=int, default=1, help="number of the first round (1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most minutes of this call (60)")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU for each engine (0.85)")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python that can import vLLM (this one)")
    parser.add_argument("--sglang-python", default=sys.executable, help="Python that can import SGLang (this one)")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.first_round < 1:
        parser.error("--rounds and --first-round must be at least 1.")
    if args.render is not None and not args.out.exists():
        parser.error(f"--render: there is no file {args.out}.")
    if args.device == "cpu" and "8b" in args.shapes:
        parser.error("--device cpu: 8b needs a GPU. Choose --shapes tiny.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.render is None:
        card = find_card(1 if args.device == "cuda" else 0)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        run_cells(args, list(all_cells(args, card, find_engines(args))))
        print(render(Table.read(args.out)))
    else:
        args.render.write_text(render(Table.read(args.out)), encoding="utf-8")


if __name__ == "__main__":
    main()
