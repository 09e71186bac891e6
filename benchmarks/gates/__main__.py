"""Measure the figures that a change must keep, on the CPU, on one GPU or on two, and compare them.

    python -m benchmarks.gates --gpus 1
    python -m benchmarks.gates --gpus 2 --out runs/gates-2.jsonl
    python -m benchmarks.gates --gpus 1 --out runs/gates-1.jsonl --only push_8b start_8b
    python -m benchmarks.gates --gpus 1 --out runs/gates-1.jsonl --judge --record
    python -m benchmarks.gates --gpus 1 --needs sglang --out runs/sglang-1.jsonl --seconds 580

Run it before and after a change under `worker`, `kernels`, `sampling`, `models`, `weight_sync`, `backends` or `train`.

A set consists of parts. Each part is the command line of a benchmark, runs as a process of its own, and is killed at
its bound. A set on GPUs takes at most 8 minutes, parts that need another engine and parts of --long aside. Progress
goes to stderr. With --needs, the set consists of the parts that need this engine; --seconds ends a call in time, and
the same command again runs what is left.

The table at the end has a row for each figure: its value, the limit that was measured on the same cards in the same
run, and the value as a share of the limit (for times the limit as a share of the value). For sampling settings the
limit is plain sampling in the same engine, and for the start it is a bare program that imports torch and runs a
kernel. Beside it is the share that `benchmarks/gates/shares.json` has for this card. A share below 0.9 of it (for the
start below 0.75, since starts vary) is a failure. A card that the file does not know gets no verdict; `--record` adds
it. Some figures have fixed bounds instead, such as a captured graph on every rank. The exit status is 1 if a figure is
below its share or outside its bounds, or if a part failed.

All lines of the benchmarks are appended to `--out` (a new file in runs/), with `part` added, and after each part a line
with the name "part_end". With the same `--out` again, parts that succeeded are not repeated unless `--only` names them.
Use a new file after a change of the code.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.gates.figures import FIGURES, Lines
from benchmarks.gates.parts import PARTS, SET_SECONDS, Part
from benchmarks.gates.running import (
    find_card,
    find_uuids,
    held_by_others,
    is_installed,
    leave_part,
    parts_to_run,
    read_lines,
    run_part,
    write_line,
)
from benchmarks.gates.shares import Row, judge, read_shares, record_shares
from benchmarks.gates.table import as_line, describe_failures, make_table


def run_parts(args: argparse.Namespace, parts: list[Part]) -> None:
    """Run the parts in turn, and say on stderr how far they are."""
    start = time.monotonic()
    apart = 0.0  # seconds of the parts that do not count
    device = "cuda" if args.gpus else "cpu"
    if held := held_by_others(find_uuids(args.gpus)):
        progress(f"The figures cannot be compared. {held}")
        write_line(args.out, {"name": "beside_others", "held": held})
    for number, part in enumerate(parts, 1):
        bound, now = part.bound, time.monotonic()
        if part.needs and not is_installed(part.needs):
            leave_part(part, args.out, f"{part.needs} is not installed", is_failure=False)
            continue
        if args.seconds is not None and now + bound > start + args.seconds:
            leave_part(part, args.out, "left: no time for its bound", is_failure=False)
            continue
        counts = args.gpus > 0 and not (part.needs or part.is_long)
        if counts:
            bound = min(bound, start + apart + SET_SECONDS - now)
            if bound <= 0:
                leave_part(part, args.out, f"left: {SET_SECONDS:g} s are over", is_failure=True)
                continue
        progress(f"part {number} of {len(parts)}, {part.name}: at most {bound:.0f} s")
        is_ok = run_part(part, device, args.out, bound)
        seconds = time.monotonic() - now
        if not counts:
            apart += seconds
        total = time.monotonic() - start
        progress(
            f"part {number} of {len(parts)}, {part.name}: {'' if is_ok else 'FAILED, '}{seconds:.1f} s of {total:.1f} s"
        )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def judge_all(args: argparse.Namespace, lines: Lines, committed: dict[str, float] | None) -> list[Row]:
    """The rows of the set. Figures of parts that were not chosen, and have no lines, are left out."""
    chosen = {part.name for part in _chosen(args, {})}
    chosen |= {part for part, _ in lines}
    return [judge(figure, lines, committed) for figure in FIGURES[args.gpus] if figure.part in chosen]


def _chosen(args: argparse.Namespace, lines: Lines) -> list[Part]:
    return parts_to_run(PARTS[args.gpus], args.only, args.long, lines, args.needs)


def failed_parts(args: argparse.Namespace, lines: Lines) -> list[Part]:
    """The parts that failed, or were left because the time was over."""

    def has_failed(part: Part) -> bool:
        end, left = (lines.get((part.name, name)) for name in ("part_end", "part_left"))
        return end["code"] != 0 if end else bool(left and left["failure"])

    return [part for part in PARTS[args.gpus] if has_failed(part)]


def open_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the card of the run, which the first line of the file names. A file of another card or set is refused."""
    earlier = read_lines(args.out).get(("", "gates"))
    if args.judge:
        if earlier is None:
            parser.error(f"--judge: {args.out} has no run.")
        card = str(earlier["card"])
    else:
        try:
            card = find_card(args.gpus)
        except RuntimeError as error:
            parser.error(str(error))
    if earlier is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_line(args.out, {"name": "gates", "gpus": args.gpus, "card": card})
    elif (earlier["gpus"], earlier["card"]) != (args.gpus, card):
        parser.error(
            f"{args.out} has a run of --gpus {earlier['gpus']} on {earlier['card']}, this one is --gpus {args.gpus} on "
            f"{card}. Use another --out."
        )
    return card


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, choices=list(PARTS), required=True, help="number of GPUs; 0: the CPU")
    parser.add_argument("--out", type=Path, help="file of JSON lines, to which lines are appended (a new one in runs/)")
    sets = "; ".join(f"--gpus {gpus}: {', '.join(part.name for part in parts)}" for gpus, parts in PARTS.items())
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"parts to run, also if they succeeded. {sets}")
    parser.add_argument("--long", action="store_true", help="also the parts that take minutes, such as the ablations")
    engines = sorted({part.needs for parts in PARTS.values() for part in parts if part.needs})
    parser.add_argument("--needs", choices=engines, help="only the parts that need this engine, long ones too")
    parser.add_argument("--seconds", type=float, help="start only parts whose bound ends within this many seconds")
    parser.add_argument("--judge", action="store_true", help="run nothing, only print the table of the file")
    parser.add_argument("--record", action="store_true", help="write this run's shares of this card to shares.json")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if unknown := set(args.only or ()) - {part.name for part in PARTS[args.gpus]}:
        parser.error(f"--gpus {args.gpus} has no part {', '.join(sorted(unknown))}: see --help.")
    if args.judge and args.out is None:
        parser.error("--judge needs --out, the file of an earlier run.")
    args.out = args.out or Path("runs", time.strftime(f"gates-{args.gpus}-%Y%m%d-%H%M%S.jsonl"))
    card = open_run(parser, args)
    if not args.judge:
        run_parts(args, _chosen(args, read_lines(args.out)))
    lines = read_lines(args.out)
    if args.record:
        number = record_shares(card, args.gpus, judge_all(args, lines, None))
        progress(f"recorded {number} shares of {card}")
    rows = judge_all(args, lines, read_shares(card, args.gpus))
    for row in rows:
        write_line(args.out, as_line(row))
    cards = f"{args.gpus} x {card}" if args.gpus else card
    print(f"{cards}; {args.out}\n\n{make_table(rows)}")
    failed = failed_parts(args, lines)
    if failures := describe_failures(failed, lines):
        print(f"\n{failures}")
    return 1 if failed or any(row.is_ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
