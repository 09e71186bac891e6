"""`verl-server trajectories index | export`: write the index of trajectories, or write them as a Parquet file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional

from verl_server.errors import BadRequestError
from verl_server.watch.index.index_build import build_indexes
from verl_server.watch.index.parquet_export import export_parquet
from verl_server.watch.index.row_kinds import indexed_files
from verl_server.watch.index.run_index import RunIndex


@dataclass(frozen=True)
class Index:
    """Write the index of trajectories that have none, or a damaged one, so that readers find episodes at once.

    A training run and a rollout write theirs themselves. A folder that a run writes now is refused.
    """

    path: Positional[Path]
    """Folder of a run, or a file of trajectories."""


@dataclass(frozen=True)
class Export:
    """Write the trajectories of a run as one Parquet file: a row for each trajectory (needs verl-server[parquet])."""

    path: Positional[Path]
    """Folder of a run, or a file of trajectories."""
    parquet: Path
    """The file to write. A file that exists is replaced."""
    step: int | None = None
    """Step that used the episodes. None exports all steps, and episodes that no step has used."""


def index(args: Index, console: Console) -> int:
    """Write the indexes of a run."""
    with _bar(console, "indexing") as report:
        built = build_indexes(args.path, report)
    for each in built:
        what = f"{each.rows:,} lines" if each.rows else "complete already"
        console.print(f"{each.path}: {what}", markup=False, highlight=False, soft_wrap=True)
    return 0


def export(args: Export, console: Console) -> int:
    """Write the trajectories of a run as a Parquet file."""
    if not indexed_files(args.path):
        raise BadRequestError(f"{args.path} has no trajectories. Name the folder of a run, or a file of trajectories.")
    found = RunIndex(args.path)
    with contextlib.closing(found):
        with _bar(console, "indexing") as report:
            while found.poll(0.5):
                report(found.progress().bytes_indexed, found.progress().bytes_total)
        if args.step is not None and args.step not in (steps := [s.step for s in found.steps() if s.step is not None]):
            has = f"It has the steps {steps[0]} to {steps[-1]}." if steps else "It has no steps: leave --step out."
            raise BadRequestError(f"{args.path} has no trajectory of step {args.step}. {has}")
        with _bar(console, "writing") as report:
            count = export_parquet(found, args.parquet, step=args.step, report=report)
        if damaged := found.progress().damaged:
            console.print(f"{damaged} damaged lines were left out.", markup=False)
    console.print(f"{args.parquet}: {count:,} trajectories", markup=False, highlight=False, soft_wrap=True)
    return 0


@contextlib.contextmanager
def _bar(console: Console, name: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how much of all bytes is done. Without a terminal, nothing is shown."""
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
