"""Ids of rows: FILE:OFFSET:DIGEST. The digest is of the line's keys, so that the id of a replaced line is refused."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Any

from verl_server.watch.index.rows import RowGoneError, RowUnknownError

KEYS = ("length", "step", "incarnation", "phase", "seed", "grp", "member", "attempt", "session", "branch")
"""Columns that tell a line from another one at its place."""


def row_id(row: sqlite3.Row) -> str:
    """Return the id of a row of the tables lines or episodes."""
    keys = "\0".join(str(row[name]) for name in KEYS)
    return f"{row['file']}:{row['offset']}:{hashlib.blake2b(keys.encode(), digest_size=3).hexdigest()}"


def find(connection: sqlite3.Connection, name: str, removed: set[str]) -> sqlite3.Row:
    """Return the row of `lines` with an id. `removed` has the segments that the run has removed.

    Raise RowUnknownError or RowGoneError, if it is not there.
    """
    file, _, rest = name.partition(":")
    offset, _, _ = rest.partition(":")
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 19):
        raise RowUnknownError(f"{name!r:.200} is no id of a row. It has the form FILE:OFFSET:DIGEST.")
    found: sqlite3.Row | None = connection.execute(
        "SELECT * FROM lines WHERE file = ? AND offset = ? AND kind != 'damaged'", (file, int(offset))
    ).fetchone()
    if found is not None and row_id(found) == name:
        return found
    if file in removed:
        raise RowGoneError(f"The run has removed {file}, because its files exceeded --keep-trajectories.")
    known: Any = connection.execute("SELECT max(offset) FROM lines WHERE file = ?", (file,)).fetchone()[0]
    if found is not None or (known is not None and int(offset) <= known):
        raise RowGoneError(f"{file:.200} was replaced, and the line {name!r:.200} is not in it any more.")
    raise RowUnknownError(f"No line that is indexed has the id {name!r:.200}. Its file may be gone, or not yet read.")
