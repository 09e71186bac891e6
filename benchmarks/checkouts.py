"""Runs a benchmark with the package of this checkout and of another one by turns, and prints their ratios.

A benchmark with the option `--against CHECKOUT` calls `compare`. The benchmark's own files are those of this checkout
in both cases, so that both packages do the same work. Machines and their load change from minute to minute, so the
packages take turns, and each figure is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import report

HERE = Path(__file__).parents[1]

Figures = dict[str, dict[str, Any]]
"""Lines of a benchmark's output by name. The last line of a name counts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        type=checkout,
        metavar="CHECKOUT",
        help="run the same command with the package of another checkout by turns, and print the ratios",
    )
    parser.add_argument("--turns", type=int, default=3, help="runs with each package, with --against (3)")


def checkout(text: str) -> Path:
    """Return the folder of a checkout, as an option of a parser."""
    path = Path(text).resolve()
    if not (path / "verl_server" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout: it has no verl_server/__init__.py.")
    return path


def without_options(argv: Sequence[str]) -> list[str]:
    """Return the arguments of the command without the options of `add_options`."""
    kept, skips = [], False
    for word in argv:
        if skips:
            skips = False
        elif word in ("--against", "--turns"):
            skips = True
        elif not word.startswith(("--against=", "--turns=")):
            kept.append(word)
    return kept


def compare(module: str, argv: Sequence[str], against: Path, turns: int) -> None:
    """Run `python -m module argv` by turns. Print each figure's median here as a ratio to the median there."""
    here, there = [], []
    for _ in range(turns):
        there.append(run(module, argv, against))
        here.append(run(module, argv, HERE))
    print_ratios(here, there, against)


def run(module: str, argv: Sequence[str], package: Path) -> Figures:
    """Run the benchmark with the package of a checkout. Raise CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as temporary:  # holds nothing else that the import could find
        (Path(temporary) / "benchmarks").symlink_to(HERE / "benchmarks")
        (Path(temporary) / "verl_server").symlink_to(package / "verl_server")
        command = [sys.executable, "-m", module, *argv]
        path = os.pathsep.join([temporary, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=temporary, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def print_ratios(here: Sequence[Figures], there: Sequence[Figures], against: Path) -> None:
    """Print one line for each figure that both packages have."""
    common = [name for name, line in here[0].items() if "value" in line and name in there[0]]
    for name in common:
        ours, theirs = values(here, name), values(there, name)
        median, base = statistics.median(ours), statistics.median(theirs)
        ratio = median / base if base else float(median == base)
        unit = here[0][name]["unit"]
        report(name, ratio, f"of {against.name}", here=median, there=base, figure_unit=unit, runs=[ours, theirs])


def values(runs: Sequence[Mapping[str, Mapping[str, Any]]], name: str) -> list[float]:
    return [run[name]["value"] for run in runs if name in run]
