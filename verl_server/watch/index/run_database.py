"""`RunDatabase`: the rows of all trajectories of a run, in a temporary database that follows the run's files.

`RunIndex` asks it. Rows come from the writers' indexes (`index_file`), as far as these can be proved to fit the files,
and from the lines themselves otherwise. It only reads the folder of the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_server.watch.index import run_tables
from verl_server.watch.index.columns import LINE, TRAINED, insert
from verl_server.watch.index.line_files import digest_before, read_lines
from verl_server.watch.index.line_rows import Row
from verl_server.watch.index.row_kinds import index_paths, indexed_files, row_of_line, table_of
from verl_server.watch.index.rows import Progress
from verl_server.watch.index.run_starts import RunStarts
from verl_server.watch.index.written_rows import FileRows, written_rows

_CHUNK_ROWS = 1000
_CHUNK_SECONDS = 0.25
_NAME = re.compile(r"verl-server-watch-([0-9]+)-.*\.sqlite(-wal|-shm|-journal)?")


@dataclass
class _File:
    """How far a file is indexed."""

    end: int = 0
    stat: tuple[int, int, int] = (-1, -1, -1)
    """Inode, size and time of change when it was read last."""
    digest: str | None = None
    is_whole: bool = False
    """True if nothing more can be read unless the file changes."""


class RunDatabase:
    def __init__(self, path: Path) -> None:
        """`path` is the folder of a run, or a file of trajectories. Nothing is read before `poll`."""
        self.path = path
        self.starts = RunStarts(path)
        self._lock = threading.Lock()
        """Held while rows are written."""
        self._files: dict[str, _File] = {}
        self._sizes: dict[str, int] = {}
        self._doubted: set[str] = set()
        self._generation = 0
        self._rows = self._damaged = 0
        self._has_copied = False
        self._error: str | None = None
        _remove_leftovers()
        descriptor, name = tempfile.mkstemp(prefix=f"verl-server-watch-{os.getpid()}-", suffix=".sqlite")
        os.close(descriptor)
        self._database = Path(name)
        self._writing = self._connect()
        self._writing.execute("PRAGMA journal_mode=WAL")
        self._writing.execute("PRAGMA synchronous=OFF")
        for statement in (*run_tables.CREATE, run_tables.AFFECTED):
            self._writing.execute(statement)
        starts = self.starts
        functions: dict[str, Callable[..., bool]] = {
            "is_asynchronous": lambda: starts.is_asynchronous,
            "was_repeated": lambda step, incarnation: not starts.lineage.has(step, incarnation),
            "was_ended": lambda incarnation: incarnation in starts.incarnations and incarnation != starts.incarnation,
        }
        for name, function in functions.items():
            self._writing.create_function(name, function.__code__.co_argcount, function)

    def close(self) -> None:
        """Remove the database."""
        with self._lock:
            self._writing.close()
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._database}{suffix}").unlink(missing_ok=True)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for questions, whose rows have names. All of its questions see the same rows."""
        connection = sqlite3.connect(f"file:{self._database}?mode=ro", uri=True, timeout=30.0)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("BEGIN")  # rows that one question names are there for the next one
            yield connection
        finally:
            connection.close()

    @property
    def folder(self) -> Path:
        """The folder with the files."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def generation(self) -> int:
        """A number that grows when rows have changed."""
        return self._generation

    def progress(self) -> Progress:
        ends = {name: file.end for name, file in list(self._files.items())}
        sizes = dict(self._sizes)
        return Progress(
            bytes_indexed=sum(min(ends.get(name, 0), size) for name, size in sizes.items()),
            bytes_total=sum(sizes.values()),
            episodes=self._rows,
            damaged=self._damaged,
            generation=self._generation,
            error=self._error,
        )

    def doubt(self, file: str) -> None:
        """Index a file again by the next `poll`: one of its lines is not where its row says."""
        self._doubted.add(file)

    def poll(self, seconds: float) -> bool:
        """Take over what is new for about `seconds`. Return True if there is more."""
        with self._lock:
            try:
                more = self._poll(time.monotonic() + seconds)
                self._error = None
                return more
            except OSError as error:
                self._error = f"{self.path} cannot be read: {error.strerror or error}"
                return False

    def _poll(self, until: float) -> bool:
        self._read_starts()
        files = indexed_files(self.path)
        self._compare(files)
        if not self._has_copied:
            self._has_copied = True
            self._copy({file.name for file in files})
        for file in files:
            state = self._files.setdefault(file.name, _File())
            while not state.is_whole:
                self._index_lines(file, state)
                if time.monotonic() >= until:
                    return any(not state.is_whole for state in self._files.values())
        return False

    # -- what the files say -----------------------------------------------------------------------------------

    def _read_starts(self) -> None:
        was_asynchronous = self.starts.is_asynchronous
        news = self.starts.read()
        if not (news.starts or news.fates or news.begun):
            return
        with self._transaction():
            self._writing.executemany(
                "INSERT OR REPLACE INTO fates VALUES (?, ?, ?, ?, ?)",
                [(f.group, f.incarnation, f.start_step, f.fate, f.step) for f in news.fates],
            )
            self._writing.executemany(
                "INSERT OR REPLACE INTO begun VALUES (?, ?, ?)", [(b.step, b.incarnation, b.time) for b in news.begun]
            )
            if news.starts or self.starts.is_asynchronous != was_asynchronous:
                self._writing.execute(run_tables.ALL_AFFECTED)
            else:
                self._writing.executemany(run_tables.FATE_AFFECTED, [(f.group, f.incarnation) for f in news.fates])
            self._settle()

    def _compare(self, files: list[Path]) -> None:
        """Forget files that are gone, or are not the ones that were indexed, and see which have grown."""
        sizes: dict[str, int] = {}
        for file in files:
            try:
                stat = file.stat()
            except FileNotFoundError:  # removed by the bound of the run's size
                continue
            now = stat.st_ino, stat.st_size, stat.st_mtime_ns
            state = self._files.setdefault(file.name, _File())
            sizes[file.name] = stat.st_size
            if state.stat != now:
                is_other = state.end > 0 and digest_before(file, state.end) != state.digest
                if is_other:
                    self._forget(file.name)
                    state = self._files.setdefault(file.name, _File())
                state.stat, state.is_whole = now, state.end >= stat.st_size
            elif state.is_whole:
                sizes[file.name] = state.end  # a last line that was cut off is not waited for
        for name in [name for name in self._files if name not in sizes or name in self._doubted]:
            self._forget(name)
        self._doubted.clear()
        self._sizes = sizes

    def _forget(self, file: str) -> None:
        state = self._files.pop(file, None)
        if state is None or not state.end:
            return
        with self._transaction():
            for statement in run_tables.FORGET:
                self._writing.execute(statement, (file,))
            self._settle()
        self._count()

    # -- rows -------------------------------------------------------------------------------------------------

    def _copy(self, files: set[str]) -> None:
        """Take over the rows of the writers' indexes that fit the files."""
        for index in index_paths(self.path):
            found = written_rows(index, self.folder, files)
            try:
                for chunk in found:
                    with self._transaction():
                        self._insert(chunk.lines, chunk.trained)
                    for name, source in chunk.files.items():
                        self._take(name, source)
            except sqlite3.DatabaseError:  # torn: what was taken over of whole files is right
                pass
        self._drop_unproved()

    def _take(self, name: str, source: FileRows) -> None:
        state = self._files.setdefault(name, _File())
        state.end, state.digest = source.end, source.digest
        state.is_whole = state.end >= state.stat[1]

    def _drop_unproved(self) -> None:
        """Remove rows of files whose rows were not all there."""
        known = {row[0] for row in self._writing.execute("SELECT file FROM lines UNION SELECT file FROM trained")}
        for name in known:
            if not self._files.setdefault(name, _File()).end:
                self._files[name].end = 1
                stat = self._files[name].stat
                self._forget(name)
                self._files[name] = _File(stat=stat)

    def _index_lines(self, file: Path, state: _File) -> None:
        """Index lines of a file for a short time, in one transaction."""
        rows: list[Row] = []
        until = time.monotonic() + _CHUNK_SECONDS
        end = state.end
        is_whole = True
        try:
            for offset, length, line in read_lines(file, end):
                rows.append((file.name, offset, length, *row_of_line(file.name, line)))
                end = offset + length
                if len(rows) >= _CHUNK_ROWS or time.monotonic() >= until:
                    is_whole = False
                    break
        except FileNotFoundError:
            state.is_whole = True
            return
        if rows:
            is_trained = table_of(file.name) == "trained"
            with self._transaction():
                self._insert([] if is_trained else rows, rows if is_trained else [])
        state.end, state.digest, state.is_whole = end, digest_before(file, end), is_whole

    def _insert(self, lines: list[Row], trained: list[Row]) -> None:
        (last,) = self._writing.execute("SELECT coalesce(max(id), 0) FROM lines").fetchone()
        self._writing.executemany(insert("trained", TRAINED), trained)
        self._writing.executemany(insert("lines", LINE), lines)
        damaged = sum(row[3] == "damaged" for row in lines)
        self._rows += len(lines) - damaged
        self._damaged += damaged + sum(row[3] == "damaged" for row in trained)
        if lines:
            for statement in run_tables.NEW_AFFECTED:
                self._writing.execute(statement, (last,))
            self._settle()

    def _settle(self) -> None:
        for statement in run_tables.SETTLE:
            self._writing.execute(statement)

    def _count(self) -> None:
        found = dict(self._writing.execute("SELECT kind = 'damaged', count(*) FROM lines GROUP BY 1").fetchall())
        (lost,) = self._writing.execute("SELECT count(*) FROM trained WHERE kind = 'damaged'").fetchone()
        self._rows, self._damaged = found.get(0, 0), found.get(1, 0) + lost

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._writing.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._writing.execute("ROLLBACK")
            raise
        self._writing.execute("COMMIT")
        self._generation += 1

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._database, isolation_level=None, check_same_thread=False)


def _remove_leftovers() -> None:
    """Remove the databases of processes that were killed."""
    for file in Path(tempfile.gettempdir()).glob("verl-server-watch-*"):
        name = _NAME.fullmatch(file.name)
        if name is not None and not _is_alive(int(name[1])):
            with contextlib.suppress(OSError):
                file.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
