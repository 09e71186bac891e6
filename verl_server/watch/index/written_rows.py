"""Reads the index that a writer made (`index_file`), and checks its rows against the files of lines.

An index may be behind, torn, of another version, or of files that were replaced. The rows of a file count if they cover
it from its begin to where the index says without a gap, if the file there is the one that was indexed, and if the last
row is what its line says.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from verl_server.watch.index.columns import LINE, PLACE_WIDTH, TRAINED, VERSION
from verl_server.watch.index.line_files import digest_before, read_line
from verl_server.watch.index.line_rows import Row
from verl_server.watch.index.row_kinds import row_of_line

_CHUNK_ROWS = 1000


@dataclass(frozen=True)
class FileRows:
    """The rows of a file reach from its begin to `end`."""

    end: int
    digest: str


@dataclass
class Chunk:
    """Some rows of an index."""

    lines: list[Row] = field(default_factory=list)
    trained: list[Row] = field(default_factory=list)
    files: dict[str, FileRows] = field(default_factory=dict)
    """The files whose last row is in this chunk. Rows of files that no chunk names do not count."""


def written_rows(index: Path, folder: Path, wanted: set[str]) -> Iterator[Chunk]:
    """Yield the rows of an index for the files `wanted` of `folder`, in chunks.

    Yield nothing for an index that is absent, of another version, or in the middle of a transaction. Raise
    sqlite3.DatabaseError if it is torn.
    """
    journal = index.with_name(f"{index.name}-journal")
    if not index.is_file() or (journal.is_file() and journal.stat().st_size):
        return
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(index))}?mode=ro", uri=True, timeout=1.0)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            return
        sources = {
            file: FileRows(end, digest)
            for file, end, digest in database.execute("SELECT file, bytes, digest FROM sources").fetchall()
            if file in wanted and digest_before(folder / file, end) == digest
        }
        ends = dict.fromkeys(sources, 0)
        for table, columns in (("lines", LINE), ("trained", TRAINED)):
            for rows in _chunks(database, table, columns):
                chunk = Chunk()
                for row in rows:
                    file, offset, length = row[:3]
                    if ends.get(file) == offset and offset < sources[file].end:
                        (chunk.lines if table == "lines" else chunk.trained).append(row)
                        ends[file] = offset + length
                        if ends[file] == sources[file].end and _is_true(folder / file, row):
                            chunk.files[file] = sources[file]
                yield chunk


def _is_true(file: Path, row: Row) -> bool:
    """Return True if a row is what the line at its place says."""
    offset, length = row[1:PLACE_WIDTH]
    line = read_line(file, offset, length)
    return line is not None and row[PLACE_WIDTH:] == row_of_line(file.name, line)


def _chunks(database: sqlite3.Connection, table: str, columns: dict[str, str]) -> Iterator[list[Row]]:
    """Yield the rows of a table in the order in which they were written. No transaction stays open in between."""
    last = 0
    while True:
        found = database.execute(
            f"SELECT rowid, {', '.join(columns)} FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT {_CHUNK_ROWS}",
            (last,),
        ).fetchall()
        if not found:
            return
        last = found[-1][0]
        yield [row[1:] for row in found]
