"""`IndexFile`: the index that a writer of trajectories makes beside its files, in SQLite.

Writing it must cost little and never harm the run. So rows are written in batches, a fault is logged once, and rows
that could not be written are given up: a reader (`run_database`) takes from an index what it can prove, and reads the
lines for the rest. Nobody but the writer of the files writes the index.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_server.files.segments import LinePlace
from verl_server.watch.index.columns import LINE, SOURCES, TRAINED, VERSION, create, insert
from verl_server.watch.index.line_files import digest_before, read_lines
from verl_server.watch.index.line_rows import Row
from verl_server.watch.index.network_files import is_on_network
from verl_server.watch.index.row_kinds import row_of_line, table_of

logger = logging.getLogger(__name__)

_BATCH_ROWS = 256
_BATCH_SECONDS = 1.0
_MOST_PENDING = 4096
"""Rows that wait for a reader to release the database. Beyond that, they are given up."""
_CATCH_UP_BYTES = 8 * 2**20
"""A writer reads its own lines again if an interruption left at most so many bytes without rows."""
_REST_SECONDS = 60.0
"""Time without a further attempt after a fault, such as a full disk."""
_BUSY = ("locked", "busy")


class IndexFile:
    """One index. Any thread may call it."""

    def __init__(self, database: Path) -> None:
        """`database` is the file of the index, beside the files of lines. Nothing is opened before the first row."""
        self.path = database
        self._folder = database.parent
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._covered: dict[str, int] = {}
        """How far each file has rows, with the pending ones."""
        self._pending: list[tuple[Any, ...]] = []
        self._flushed = time.monotonic()
        self._rests_until = 0.0
        """After a fault, nothing is tried until this time of the monotonic clock."""
        self._is_warned = False

    def add(self, places: Sequence[LinePlace], rows: Callable[[], Sequence[Row]]) -> None:
        """Add the rows of lines that were just written, in order. No fault is raised.

        `rows` makes the rows: one that cannot be made must not end the run either.
        """
        with self._lock:
            if time.monotonic() < self._rests_until:
                return
            try:
                self._add(places, rows())
                if len(self._pending) >= _BATCH_ROWS or time.monotonic() - self._flushed >= _BATCH_SECONDS:
                    self._flush()
            except Exception as error:
                self._give_up(error)

    def close(self) -> None:
        """Write the rows that wait, and close the index."""
        with self._lock:
            try:
                self._flush()
            except Exception as error:
                self._give_up(error)
            self._close()

    def _add(self, places: Sequence[LinePlace], rows: Sequence[Row]) -> None:
        if not places:
            return
        if self._connection is None:
            self._open()
            if self._connection is None:
                return
        for place, row in zip(places, rows, strict=True):
            if self._covered.get(place.file, 0) != place.offset:
                self._catch_up(place.file, place.offset)
            if self._covered.get(place.file, 0) == place.offset:
                self._pending.append((*place, *row))
                self._covered[place.file] = place.offset + place.length

    def _catch_up(self, file: str, end: int) -> None:
        """Read the lines before `end` that have no rows, unless they are many: then the file gets no further rows."""
        begin = self._covered.get(file, 0)
        if begin > end:  # the file was cut or replaced under this index
            self._flush()
            self._forget([file])
            begin = 0
        if end - begin > _CATCH_UP_BYTES:
            return
        for offset, length, line in read_lines(self._folder / file, begin):
            if offset >= end:
                break
            self._pending.append((file, offset, length, *row_of_line(file, line)))
            self._covered[file] = offset + length

    def _flush(self) -> None:
        """Write the pending rows in one transaction. While a reader holds the database, they wait."""
        if self._connection is None or not self._pending:
            return
        database = self._connection
        files = {row[0] for row in self._pending}
        sources = []
        for file in files:
            path, end = self._folder / file, self._covered[file]
            if (digest := digest_before(path, end)) is not None:
                sources.append((file, end, path.stat().st_ino, digest))
        try:
            database.execute("BEGIN IMMEDIATE")
            for table, columns in (("lines", LINE), ("trained", TRAINED)):
                mine = [row for row in self._pending if table_of(str(row[0])) == table]
                database.executemany(insert(table, columns), mine)
            database.executemany("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?)", sources)
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            if not any(word in str(error) for word in _BUSY) or len(self._pending) > _MOST_PENDING:
                raise
            self._flushed = time.monotonic()
            return
        self._pending.clear()
        self._flushed = time.monotonic()

    def _open(self) -> None:
        if is_on_network(self._folder):
            logger.info("%s is not written: the folder is on a network, where SQLite's locks are slow.", self.path.name)
            self._rests_until = math.inf
            return
        try:
            self._connection = self._connect()
        except sqlite3.OperationalError:  # the disk is full, or the folder is read-only
            raise
        except sqlite3.DatabaseError:  # torn by a kill
            self._remove()
            self._connection = self._connect()
        known = self._connection.execute("SELECT file, bytes, digest FROM sources").fetchall()
        wrong = [file for file, end, digest in known if digest_before(self._folder / file, end) != digest]
        self._covered = {file: end for file, end, _ in known}
        self._forget(wrong)

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=TRUNCATE")
            database.execute("PRAGMA synchronous=OFF")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"the version {version}")
            if version == 0:
                create_tables(database)
            database.execute("SELECT count(*) FROM sources").fetchone()
        except BaseException:
            database.close()
            raise
        return database

    def _forget(self, files: Sequence[str]) -> None:
        """Remove the rows of files that are gone, or that are not the ones that were indexed."""
        assert self._connection is not None
        for file in files:
            self._connection.execute("BEGIN IMMEDIATE")
            for table in ("lines", "trained", "sources"):
                self._connection.execute(f"DELETE FROM {table} WHERE file = ?", (file,))
            self._connection.execute("COMMIT")
            self._covered.pop(file, None)

    def _give_up(self, error: Exception) -> None:
        """Give up the pending rows. Readers will read their lines."""
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "The index %s cannot be written: %s. The run goes on, and readers index the lines themselves.",
                *(self.path, error),
            )
        self._pending.clear()
        self._rests_until = time.monotonic() + _REST_SECONDS
        self._close()  # it is opened again afterwards

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _remove(self) -> None:
        for name in (self.path.name, f"{self.path.name}-journal"):
            (self._folder / name).unlink(missing_ok=True)


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables of a writer's index."""
    database.execute("BEGIN IMMEDIATE")
    for statement in (create("lines", LINE), create("trained", TRAINED), SOURCES, f"PRAGMA user_version={VERSION}"):
        database.execute(statement)
    database.execute("COMMIT")
