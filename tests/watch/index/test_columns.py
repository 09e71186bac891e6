"""Rows of an index that a writer left are taken as they are, so `VERSION` changes with how they are computed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from verl_server.watch.index.columns import LINE, TRAINED, VERSION, create
from verl_server.watch.index.line_files import read_lines
from verl_server.watch.index.line_rows import damaged_row
from verl_server.watch.index.row_kinds import indexed_files, row_of_line

RECORDED = Path(__file__).parent / "recorded_run"
"""Lines of a run: an attempt after a failure, an agent's branches and sub-agent, versions of several forms, a large
seed, a step that was not completed, and what the trainer recorded."""
DIGESTS = {1: "624cf839fb50cbd3", 2: "5ddbd1426f8d331c"}
"""Version -> digest of the tables and of the rows of `RECORDED`."""


def test_rows_that_are_computed_otherwise_have_another_version() -> None:
    tables = [create("lines", LINE), create("trained", TRAINED)]
    rows = [
        (file.name, offset, length, *row_of_line(file.name, line))
        for file in indexed_files(RECORDED)
        for offset, length, line in read_lines(file, 0)
    ]
    assert len(rows) == 11 and not any("damaged" in row for row in rows)
    found = msgspec.json.encode([tables, rows, damaged_row("bad"), damaged_row("bad", trained=True)])
    digest = hashlib.blake2b(found, digest_size=8).hexdigest()
    assert DIGESTS.get(VERSION) == digest, (
        "The rows are no longer those of the version, and indexes that runs have would be taken for current ones: "
        f"raise VERSION in watch/index/columns.py, and enter the digest {digest!r} for it here."
    )
