"""Which files of a run have rows in an index, in which table, and in which index."""

from __future__ import annotations

import re
from pathlib import Path

from verl_server.watch.index.line_files import MOST_LINE_BYTES
from verl_server.watch.index.line_rows import Row, damaged_row, line_row, trained_line_row

_NAME = re.compile(r"(trajectories|untrained|held-out|trained)-rank(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?\.jsonl")


def indexed_files(path: Path) -> list[Path]:
    """Return the files of a run's folder that have rows, those with the newest lines first; or `path`, if it is a file.

    Raise OSError if the folder cannot be read.
    """
    if not path.is_dir():
        return [path] if path.is_file() else []
    found = []
    for file in path.iterdir():
        if (name := _NAME.fullmatch(file.name)) is not None:
            found.append((int(name[3] or 0), name[1], int(name[2]), file))
        elif file.name == "trajectories.jsonl":
            found.append((0, "trajectories", -1, file))
    return [file for *_, file in sorted(found, reverse=True)]


def index_paths(path: Path) -> list[Path]:
    """Return the writers' indexes of a run's folder, or of a file with trajectories, that may exist."""
    if not path.is_dir():
        return [index_beside(path)]
    return [*sorted(path.glob("index-rank*.sqlite")), index_beside(path / "trajectories.jsonl")]


def index_beside(file: Path) -> Path:
    """Return the path of the index of a single file with trajectories."""
    return file.with_name(f"{file.name}.index.sqlite")


def index_of_rank(folder: Path, rank: int) -> Path:
    """Return the path of the index of a rank's files."""
    return folder / f"index-rank{rank}.sqlite"


def table_of(file: str) -> str:
    """Return the table that has the rows of a file: trained, or lines."""
    return "trained" if kind_of(file) == "trained" else "lines"


def kind_of(file: str) -> str:
    """Return the kind of a file's rows: trajectory, untrained, held-out or trained."""
    name = _NAME.fullmatch(file)
    return "trajectory" if name is None or name[1] == "trajectories" else name[1]


def rank_of(file: str) -> int | None:
    """Return the rank that wrote a file of a training run; None for another file."""
    name = _NAME.fullmatch(file)
    return None if name is None else int(name[2])


def row_of_line(file: str, line: bytes | None) -> Row:
    """Return the row of a line, without its place; None is a line that is too long."""
    kind = kind_of(file)
    if line is None:
        return damaged_row(f"the line has more than {MOST_LINE_BYTES // 2**20} MiB", trained=kind == "trained")
    return trained_line_row(line) if kind == "trained" else line_row(kind, line)
