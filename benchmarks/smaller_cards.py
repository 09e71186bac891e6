"""Start and speed of the engine on a GPU of which another process holds all but 16, 24, 40 or 48 GiB.

    python -m benchmarks.smaller_cards --device cuda --out runs/smaller-cards.jsonl --minutes 9
    python -m benchmarks.smaller_cards --out runs/smaller-cards.jsonl --judge
    python -m benchmarks.smaller_cards --device cpu --shapes tiny --out runs/smaller.jsonl

A case is one size and shape in one round. A process holds the rest of the GPU (`benchmarks.held_memory`), and
`benchmarks.offline` starts an engine beside it, waits until all CUDA graphs are captured, and runs two workloads:
`few`, whose requests all fit the KV cache of the smallest card, and `many`, 256 requests. The whole card, without a
process that holds memory, takes its turn in every round; every second round is in the other order. All lines are
appended to --out, and the same command again runs the cases that are missing. A case ends at its bound, and none starts
that could not end within --minutes.

Every case is reported as a line `smaller_card`, and all of them as a table:

    decode graphs   captured, of those that there can be. All should be captured
    few, of full    tokens/s of `few`, and the ratio to the whole card. The goal is 0.95
    many, of limit  tokens/s of `many`, and their share of what memory and arithmetic of this card allow if as many
                    requests run at once as the KV cache holds at their mean length (`workload.seconds_with_capacity`).
                    All requests grow at the same time, so a cache that holds fewer of them at their full length lets
                    the last ones wait, or retracts them: that is lost
    of full         that share divided by the whole card's. The goal is 0.95
    lost            what the smaller memory costs: requests at once, graphs; or the error of a start that failed

Figures are medians over the rounds. With --device cpu nothing is held: the KV cache has that many GiB instead, which
tries the command out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gates.figures import Lines
from benchmarks.gates.parts import Part
from benchmarks.gates.running import find_uuids, held_by_others, read_lines, run_part, write_line
from benchmarks.held_memory import smaller_card
from benchmarks.shapes import SHAPES
from benchmarks.workload import Ceilings, parse_work, seconds_with_capacity

GOAL = 0.95
_CASE_SECONDS, _CEILING_SECONDS = 120.0, 90.0
_FEW = {"0.6b": "128x512x256", "8b": "32x512x256", "tiny": "2x32x16"}
_MANY = {"0.6b": "256x512x256", "8b": "256x512x256", "tiny": "8x32x16"}
"""Shape -> requests x prompt tokens x output tokens. `few` fits 16 GiB (0.6b) and 24 GiB (8b)."""
_SIZES = {"0.6b": [16.0, 24.0, 40.0, 48.0], "8b": [24.0, 40.0, 48.0], "tiny": [0.01, 0.02]}
"""Shape -> GiB of the cards that are simulated. 8B has 15.3 GiB of weights."""


@dataclass(frozen=True)
class Case:
    shape: str
    size: float | None
    """GiB of the card, None for all of it."""
    round: int

    @property
    def card(self) -> str:
        return "full" if self.size is None else f"{self.size:g} GiB"

    @property
    def part(self) -> Part:
        """The process of the case, for `benchmarks.gates.running`."""
        name = f"{self.shape} {self.card} {self.round}"
        options = "--no-ceilings --no-logprobs --prefix-cache --all-graphs"
        works = f"few={_FEW[self.shape]} many={_MANY[self.shape]}"
        return Part(name, f"offline --shape {self.shape} {options} --works {works}", _CASE_SECONDS)


CEILINGS = Part("ceilings", "ceilings", _CEILING_SECONDS)


def all_cases(shapes: list[str], rounds: int) -> Iterator[Case]:
    """The cases in the order in which they run: by turns, and every second round in the other order."""
    for number, shape in itertools.product(range(1, rounds + 1), shapes):
        sizes: list[float | None] = [None, *_SIZES[shape]]
        for size in sizes if number % 2 else reversed(sizes):
            yield Case(shape, size, number)


def run_cases(args: argparse.Namespace, cases: list[Case]) -> None:
    """Run the cases that have not succeeded, as long as there is time."""
    deadline = time.monotonic() + 60 * args.minutes
    done = read_lines(args.out)
    if held := held_by_others(find_uuids(1 if args.device == "cuda" else 0)):
        progress(f"The figures cannot be compared. {held}")
        write_line(args.out, {"name": "beside_others", "held": held})
    if not _has_succeeded(done, CEILINGS):
        run_part(CEILINGS, args.device, args.out)
    for case in cases:
        if _has_succeeded(done, case.part):
            continue
        if time.monotonic() + case.part.bound > deadline:
            progress(f"{case.part.name}: left, no time for its bound of {case.part.bound:g} s")
            continue
        progress(f"{case.part.name}: at most {case.part.bound:g} s")
        run_case(args, case)


def run_case(args: argparse.Namespace, case: Case) -> None:
    part = case.part
    with contextlib.ExitStack() as stack:
        if case.size is not None and args.device == "cuda":
            held = stack.enter_context(smaller_card(case.size))
            write_line(args.out, {"part": part.name, "name": "held"} | held)
        elif case.size is not None:
            part = Part(part.name, f"{part.command} --set kv_cache_gib={case.size}", part.bound)
        run_part(part, args.device, args.out)


def _has_succeeded(lines: Lines, part: Part) -> bool:
    return bool(lines.get((part.name, "part_end"), {}).get("code") == 0)


# -- what the lines say ------------------------------------------------------------------------------------------------


def summarize(lines: Lines, cases: list[Case], device: str) -> list[dict[str, Any]]:
    """Return one line for each shape and size that was run. Ratios are those to the whole card."""
    keys = list(dict.fromkeys((case.shape, case.size) for case in cases))
    rows = []
    for shape, size in keys:
        mine = [case for case in cases if (case.shape, case.size) == (shape, size)]
        if row := _row(lines, mine, device):
            rows.append(row)
    full = {row["shape"]: row for row in rows if row["card"] == "full"}
    for row in rows:
        whole = full.get(row["shape"], {})
        for name in ("few", "share"):
            if row.get(name) and whole.get(name):
                row[f"{name}_of_full"] = round(row[name] / whole[name], 3)
    return rows


def _row(lines: Lines, cases: list[Case], device: str) -> dict[str, Any] | None:
    """Return the figures of one shape and size, medians over the rounds; None if no round was run."""
    ends = [lines[case.part.name, "part_end"] for case in cases if (case.part.name, "part_end") in lines]
    if not ends:
        return None
    row: dict[str, Any] = {"name": "smaller_card", "shape": cases[0].shape, "card": cases[0].card, "rounds": len(ends)}
    names = [case.part.name for case in cases if _has_succeeded(lines, case.part)]
    if not names:
        last = [line for line in ends[-1].get("stderr", "").splitlines() if line.strip()]
        return row | {"lost": "it did not start: " + (last[-1] if last else "see part_end")}

    def median(line: str, field: str = "value") -> float | None:
        values = [lines[name, line][field] for name in names if field in lines.get((name, line), {})]
        return statistics.median(values) if values else None

    few, many, capacity = median("few"), median("many"), median("kv_cache_tokens")
    row |= {"few": few, "many": many, "kv_cache_tokens": capacity}
    row |= {
        "decode_graphs": median("decode_cuda_graphs"),
        "decode_graphs_in_all": median("decode_cuda_graphs", "in_all"),
    }
    row["graphs_without_memory"] = median("cuda_graphs", "cuda_graphs_without_memory")
    work = parse_work(f"many={_MANY[row['shape']]}").work
    if many and capacity and ("ceilings", "copy_ceiling") in lines:
        gemm, copy = (lines["ceilings", f"{kind}_ceiling"]["value"] for kind in ("gemm", "copy"))
        itemsize = 2 if device == "cuda" else 4
        seconds = seconds_with_capacity(
            SHAPES[row["shape"]], work, Ceilings(gemm * 1e9, copy * 1e9), itemsize, int(capacity)
        )
        row["limit"] = round(work.output_tokens / seconds, 1)
        row["share"] = round(many / row["limit"], 4)
    row["lost"] = "; ".join(_losses(row, len(work.prompts), len(work.prompts[0]), work.output_lens[0])) or "nothing"
    return row


def _losses(row: dict[str, Any], requests: int, prompt: int, output: int) -> list[str]:
    found = []
    if row["kv_cache_tokens"]:
        at_once = int(row["kv_cache_tokens"] / (prompt + output))
        if at_once < requests:
            found.append(f"the KV cache holds {at_once} of {requests} requests at their full length")
    if row["decode_graphs"] is not None and row["decode_graphs"] < row["decode_graphs_in_all"]:
        found.append(f"{row['decode_graphs_in_all'] - row['decode_graphs']:g} decode graphs")
    if row["graphs_without_memory"]:
        found.append(f"{row['graphs_without_memory']:g} graphs do not fit")
    return found


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    head = ("shape", "card", "KV tokens", "decode graphs", "few", "of full", "many", "of limit", "of full", "lost")
    cells = [head, ("---",) * len(head)]
    for row in rows:
        graphs = (
            "-" if row.get("decode_graphs") is None else f"{row['decode_graphs']:g} of {row['decode_graphs_in_all']:g}"
        )
        ratios = [_ratio(row.get(name)) for name in ("few_of_full", "share", "share_of_full")]
        rates = [_count(row.get(name)) for name in ("kv_cache_tokens", "few", "many")]
        cells.append(
            (row["shape"], row["card"], rates[0], graphs, rates[1], ratios[0], rates[2], *ratios[1:], row["lost"])
        )
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smaller_cards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where the engine runs (cuda)")
    parser.add_argument("--shapes", nargs="+", choices=list(_SIZES), default=["0.6b", "8b"], help="shapes (0.6b 8b)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, by turns (2)")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, to which lines are appended")
    parser.add_argument("--minutes", type=float, default=30.0, help="start no case that could end later (30)")
    parser.add_argument("--judge", action="store_true", help="run nothing, only print the lines and the table")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cases = list(all_cases(args.shapes, args.rounds))
    if not args.judge:
        run_cases(args, cases)
    rows = summarize(read_lines(args.out), cases, args.device)
    for row in rows:
        print(json.dumps(row), flush=True)
    print(f"\n{make_table(rows)}")


if __name__ == "__main__":
    main()
