"""The tables of an index of trajectories: their columns, and the number of their version.

A writer's index (`index_file`) lies beside the files of one rank. A reader copies its rows into the database of the
run (`run_database`), which has more columns.
"""

from __future__ import annotations

VERSION = 2
"""`PRAGMA user_version`. An index of another version counts as absent."""

PLACE_WIDTH = 3
"""Number of the first columns of both tables, which are the place of the line."""

LINE = {
    "file": "TEXT NOT NULL",
    "offset": "INTEGER NOT NULL",
    "length": "INTEGER NOT NULL",
    "kind": "TEXT NOT NULL",  # trajectory, untrained (the run did not complete the step), held-out or damaged
    "step": "INTEGER",
    "rank": "INTEGER",
    "incarnation": "TEXT",
    "time": "REAL",
    "phase": "TEXT",
    "seed": "TEXT",
    "episode_id": "TEXT",
    "grp": "INTEGER",
    "member": "INTEGER",
    "attempt": "INTEGER",
    "task": "TEXT",
    "session": "TEXT",
    "parent": "TEXT",
    "branch": "INTEGER",
    "fork_of": "INTEGER",
    "shared": "INTEGER",
    "reward": "REAL",
    "stop_reason": "TEXT",
    "fault": "TEXT",
    "error": "TEXT",  # the first characters; of a damaged line, what is wrong
    "turns": "INTEGER",
    "tokens": "INTEGER",
    "sampled": "INTEGER",
    "generate_s": "REAL",
    "env_s": "REAL",
    "queue_s": "REAL",
    "clock": "REAL",  # wall time of second 0 of the waits
    "first": "REAL",  # begin of the first wait, and end of the last one, on this clock
    "last": "REAL",
    "waits": "BLOB",  # `line_rows.pack_waits`
    "oldest": "TEXT",
    "newest": "TEXT",
    "versions": "INTEGER",
    "tools": "TEXT",  # names, sorted, separated by line ends
    "logprob": "REAL",
    "answer": "TEXT",  # the first characters of what the environment said at last
}
"""Columns of `lines`: one row for each line of a file with trajectories."""

TRAINED = {
    "file": "TEXT NOT NULL",
    "offset": "INTEGER NOT NULL",
    "length": "INTEGER NOT NULL",
    "kind": "TEXT NOT NULL",  # trained or damaged
    "step": "INTEGER",
    "incarnation": "TEXT",
    "sampled_step": "INTEGER",
    "sampled_rank": "INTEGER",
    "grp": "INTEGER",
    "member": "INTEGER",
    "attempt": "INTEGER",
    "session": "TEXT",
    "branch": "INTEGER",
    "advantage": "REAL",
    "age": "INTEGER",
    "gap_mean": "REAL",
    "gap_max": "REAL",
    "entropy": "REAL",
}
"""Columns of `trained`: one row for each line of trained-rankN.jsonl."""

SOURCES = "CREATE TABLE sources (file TEXT PRIMARY KEY, bytes INTEGER NOT NULL, inode INTEGER, digest TEXT)"
"""How far each file is indexed, always up to a line end; and a digest of what is before this place."""


def create(table: str, columns: dict[str, str], *more: str) -> str:
    """Return the statement that creates a table."""
    fields = [f"{name} {kind}" for name, kind in columns.items()]
    return f"CREATE TABLE {table} ({', '.join([*more, *fields])})"


def insert(table: str, columns: dict[str, str]) -> str:
    """Return the statement that inserts a row, whose values are in the order of the columns."""
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
