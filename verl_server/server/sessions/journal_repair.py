"""Repair of a damaged session store: `verl-server trajectories repair FOLDER`.

A server refuses a store in which a record is damaged and other records or files follow it. `repair` cuts each damaged
file at its last whole record, and keeps a copy of the file as it was. It takes the lock of the folder, so that no
server writes meanwhile. Records of later files stay; if one of them needs a lost record, `restart.restore` refuses it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_server.errors import BadRequestError
from verl_server.server.sessions.records import DamagedRecordError, read_record

_NAME = re.compile(r"(journal|snapshot)-\d{8}\.log")


@dataclass(frozen=True)
class Damage:
    """The first record of a file that cannot be read."""

    path: Path
    offset: int
    """Bytes of the whole records before it."""
    size: int
    """Bytes of the file."""
    reason: str

    def __str__(self) -> str:
        lost = self.size - self.offset
        return f"{self.path}, byte {self.offset}: {self.reason}. {lost} bytes from there on cannot be kept."


def find_damage(folder: Path) -> list[Damage]:
    """Return the damage of a store, one for each damaged file. Raise BadRequestError if the folder is no store."""
    files = sorted(path for path in folder.glob("*.log") if _NAME.fullmatch(path.name))
    if not files:
        raise BadRequestError(f"{folder} is no session store: it has no journal-NNNNNNNN.log.")
    return [damage for path in files if (damage := _damage_of(path)) is not None]


def _damage_of(path: Path) -> Damage | None:
    data, offset = path.read_bytes(), 0
    while offset < len(data):
        try:
            _, offset = read_record(data, offset)
        except DamagedRecordError as error:
            return Damage(path, offset, len(data), str(error))
    return None


def repair(damage: Damage) -> Path:
    """Cut a file at its last whole record, and return the path of a copy of the whole file.

    The copy is on disk before the file is cut. An earlier copy is never replaced.
    """
    number = 0
    while (copy := damage.path.with_name(f"{damage.path.name}.damaged-{number}")).exists():
        number += 1
    shutil.copy2(damage.path, copy)
    for path in (copy, damage.path.parent):
        _sync(path)
    os.truncate(damage.path, damage.offset)
    _sync(damage.path)
    return copy


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Report the damage of a store, and repair it unless `--check` is given. Return 1 if damage is left."""
    parser = argparse.ArgumentParser(prog="verl-server trajectories repair", description="Repair a session store.")
    parser.add_argument("folder", type=Path, help="folder of --session-store")
    parser.add_argument("--check", action="store_true", help="report the damage only, and change nothing")
    args = parser.parse_args(argv)
    with locked(args.folder):
        found = find_damage(args.folder)
        for damage in found:
            print(damage)
            if not args.check:
                print(f"  Cut at byte {damage.offset}. The whole file is kept as {repair(damage)}.")
    if not found:
        print(f"{args.folder}: all records are whole.")
    elif args.check:
        print("Run the command without --check to cut each file there; a copy of the file is kept.")
    return 1 if found and args.check else 0
