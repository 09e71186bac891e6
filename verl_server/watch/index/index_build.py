"""`build_indexes`: writes the indexes of a folder or a file that has none, from its lines.

`verl-server trajectories index` calls it, for files of earlier versions, and for those whose index is torn or behind.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.files.run_output import claim_file, claim_folder
from verl_server.watch.index.columns import LINE, TRAINED, insert
from verl_server.watch.index.index_file import create_tables
from verl_server.watch.index.line_files import digest_before, read_lines
from verl_server.watch.index.row_kinds import index_beside, index_of_rank, indexed_files, rank_of, row_of_line, table_of
from verl_server.watch.index.written_rows import written_rows

_CHUNK_ROWS = 1000


@dataclass(frozen=True)
class BuiltIndex:
    path: Path
    rows: int
    """Rows that were written; 0 if the index was complete before."""


def build_indexes(path: Path, report: Callable[[int, int], None]) -> list[BuiltIndex]:
    """Write the indexes that are absent, torn or behind.

    `report` is called with the bytes that were read, and those of all files. Raise BadRequestError if there is nothing
    to index, if a run writes the files now, or if the index cannot be written.
    """
    files = indexed_files(path)
    if not files:
        raise BadRequestError(f"{path} has no trajectories. Name the folder of a run, or a file of trajectories.")
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            stack.callback(claim_folder(path).release)
        for file in files:
            if rank_of(file.name) is None:
                stack.callback(claim_file(file).release)
        by_index: dict[Path, list[Path]] = {}
        for file in reversed(files):  # the oldest first, as a writer has them
            rank = rank_of(file.name)
            index = index_beside(file) if rank is None else index_of_rank(file.parent, rank)
            by_index.setdefault(index, []).append(file)
        progress = _Progress(report, sum(file.stat().st_size for file in files))
        return [_build(index, found, progress) for index, found in by_index.items()]


class _Progress:
    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, length: int) -> None:
        self._done += length
        self._report(self._done, self._total)


def _build(index: Path, files: list[Path], progress: _Progress) -> BuiltIndex:
    if _is_complete(index, files):
        progress.add(sum(file.stat().st_size for file in files))
        return BuiltIndex(index, 0)
    new = index.with_name(f".{index.name}.partial")
    try:
        new.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("PRAGMA synchronous=OFF")
            create_tables(database)
            rows = sum(_write(database, file, progress) for file in files)
        os.replace(new, index)
        index.with_name(f"{index.name}-journal").unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise BadRequestError(f"The index {index} cannot be written: {error}.") from None
    return BuiltIndex(index, rows)


def _write(database: sqlite3.Connection, file: Path, progress: _Progress) -> int:
    """Write the rows of a file, and return their number."""
    table = table_of(file.name)
    statement = insert(table, TRAINED if table == "trained" else LINE)
    count = end = 0
    for chunk in _chunks(file):
        database.execute("BEGIN")
        database.executemany(statement, chunk)
        database.execute("COMMIT")
        count += len(chunk)
        end = chunk[-1][1] + chunk[-1][2]
        progress.add(sum(row[2] for row in chunk))
    if end:
        source = (file.name, end, file.stat().st_ino, digest_before(file, end))
        database.execute("INSERT INTO sources VALUES (?, ?, ?, ?)", source)
    return count


def _chunks(file: Path) -> Iterator[list[tuple[Any, ...]]]:
    rows: list[tuple[Any, ...]] = []
    for offset, length, line in read_lines(file, 0):
        rows.append((file.name, offset, length, *row_of_line(file.name, line)))
        if len(rows) == _CHUNK_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _is_complete(index: Path, files: list[Path]) -> bool:
    """Return True if an index has all rows of the whole lines."""
    proved: dict[str, int] = {}
    try:
        for chunk in written_rows(index, index.parent, {file.name for file in files}):
            proved |= {name: source.end for name, source in chunk.files.items()}
    except sqlite3.Error:
        return False
    return all(next(read_lines(file, proved.get(file.name, 0)), None) is None for file in files)
