"""Repair of a damaged session store: `verl-server trajectories repair FOLDER`.

A server refuses a store in which a record is damaged or a file is missing. `repair` gives up the lost records. It keeps
a copy of a damaged file, and cuts the file after its last complete record. It creates an empty file for a missing file.
It ends each of these files with a `CutRecord`. It holds the lock of the folder, so that no server writes during the
repair. The records of later files stay. `restart.restore` skips the sessions that need a lost record.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tyro.conf import Positional

from verl_server.errors import BadRequestError
from verl_server.files.command_options import parse_options
from verl_server.files.durable import flush, write_file
from verl_server.files.json_files import read_bytes
from verl_server.server.sessions.journal_files import CURRENT, Damage, JournalFiles
from verl_server.server.sessions.records import (
    CurrentRecord,
    CutRecord,
    DamagedRecordError,
    EndRecord,
    HeaderRecord,
    Record,
    framed,
    read_record,
)


def find_damage(folder: Path) -> list[Damage]:
    """Return the damage of a store, one for each damaged file. Raise BadRequestError if the folder is no store."""
    found: dict[Path, Damage] = {}

    def note(damage: Damage) -> None:
        if not damage.is_torn_end:  # the server cuts it off
            found.setdefault(damage.path, damage)

    for _ in JournalFiles(folder, _header(folder)).scan(note):
        pass
    return list(found.values())


def repair(damage: Damage, header: HeaderRecord) -> Path | None:
    """Cut a damaged file at its last whole record, or create a missing file, and end it with a `CutRecord`.

    Return the path of a copy of the damaged file, None if the file was missing. The copy is on disk before the file is
    changed. An earlier copy is never replaced. A damaged file `current` is written again.
    """
    path = damage.path
    copy = _copy(path) if path.exists() else None
    if path.name == CURRENT:
        kept = framed(CurrentRecord(max(map(_number, path.parent.glob("*-*.log"))), None))
    else:
        kept = read_bytes(path)[: damage.offset] if copy is not None else b""
        kept = kept or framed(msgspec.structs.replace(header, number=_number(path)))
        kept += framed(CutRecord(damage.reason))
    if path.name.startswith("snapshot"):
        kept += framed(EndRecord(sum(1 for _ in _records(kept))))
    write_file(path, kept)
    path.chmod(0o600)
    return copy


def _number(path: Path) -> int:
    """Return the number in the name of a journal or a snapshot."""
    return int(path.stem.rpartition("-")[2])


def _header(folder: Path) -> HeaderRecord:
    """Return the header of any file of a store. Raise BadRequestError if there is none."""
    files = sorted([*folder.glob("snapshot-*.log"), *folder.glob("journal-*.log")])
    for path in files:
        record = next(_records(read_bytes(path)), None)
        if isinstance(record, HeaderRecord):
            return HeaderRecord(record.format, record.vocabulary, record.tokenizer, record.model_path)
    if not files:
        raise BadRequestError(f"{folder} is no session store: it has no journal-NNNNNNNN.log.")
    raise BadRequestError(f"No file of {folder} has a header that can be read, so nothing can be kept.")


def _records(data: bytes) -> Iterator[Record]:
    """Yield the complete records before the first damage."""
    offset = 0
    while offset < len(data):
        try:
            record, offset = read_record(data, offset)
        except DamagedRecordError:
            return
        yield record


def _copy(path: Path) -> Path:
    number = 0
    while (copy := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    shutil.copy2(path, copy)
    flush(copy)
    flush(copy.parent)
    return copy


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a store. Raise BadRequestError if a server holds it, or if the folder does not exist."""
    if not folder.is_dir():
        raise BadRequestError(f"{folder} is no folder. Name the folder of --session-store.")
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadRequestError(f"A server uses {folder}. Stop it before the repair.") from None
    finally:
        os.close(fd)


@dataclass(frozen=True)
class RepairArgs:
    """Repair the session store of a server that has ended: give up what a damaged file lost, and keep a copy of it.

    Exit status: 0 if all records are whole or the store was repaired, 1 if --check found damage or after an error, 2
    for wrong options.
    """

    folder: Positional[Path]
    """Folder of --session-store."""
    check: bool = False
    """Report the damage only, and change nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Report the damage of a store, and repair it unless `--check` is given. Return 1 if damage is left."""
    args = parse_options(RepairArgs, argv, "verl-server trajectories repair")
    with locked(args.folder):
        found = find_damage(args.folder)
        header = _header(args.folder)
        for damage in found:
            print(f"{damage}. {damage.size - damage.offset} bytes from there on cannot be kept.")
            if not args.check:
                copy = repair(damage, header)
                print("  Given up." + (f" The whole file is kept as {copy}." if copy is not None else ""))
    if not found:
        print(f"{args.folder}: all records are whole.")
    elif args.check:
        print("Run the command without --check to give up what was lost; a copy of each file is kept.")
    return 1 if found and args.check else 0
