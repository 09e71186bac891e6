"""`FrameTail`: the records in the files of a session store, read while a server may append to them.

`server.sessions.journal_files` writes them: a snapshot of all records before journal N, and the journals from N on.
This reader opens them for reading only. It locks, cuts off and removes nothing, as the server does when it opens a
store. What it cannot read is counted and skipped.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from verl_server.errors import BadRequestError
from verl_server.files.following import Faults, size_of
from verl_server.files.run_output import is_claimed
from verl_server.server.sessions.records import (
    FRAME,
    LARGEST,
    CurrentRecord,
    DamagedRecordError,
    possible_records,
    read_record,
)

LOCK = "lock"
"""Name of the file that a server holds while it uses the store."""
LONGEST = 64 * 2**20
"""Bytes of a record beyond which it is skipped."""
_NAME = re.compile(r"(journal|snapshot)-(\d{8})\.log")
_CHUNK = 2**20
_OVERLAP = 64
"""Bytes of a piece that are searched with the next piece, too: a record's first bytes may lie across both."""


class Frame(NamedTuple):
    """A record on disk: its kind and its payload, as `records.decoded` takes them."""

    file: int
    """Number of the file among those of the tail, for `body_at`."""
    offset: int
    body: memoryview


class FrameTail:
    def __init__(self, folder: Path, longest: int = LONGEST) -> None:
        """`folder` is that of the store. Nothing is read before `read`."""
        self.faults = Faults()
        """The places that were skipped, and files that could not be read."""
        self._folder, self._longest = folder, longest
        self._files: list[Path] = []
        """The files that were read, the current one is the last."""
        self._snapshot: int | None = None
        self._offset = self._closed_bytes = 0
        self._inode: int | None = None
        self._sought: tuple[int, int] | None = None
        """(place, size of the file) of the last search for a record behind damage in the newest file."""

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes of the files."""
        chain = self._chain(self._snapshot if self._files else self._newest_snapshot())
        left = [size_of(path) for path in chain if path not in self._files[:-1]]
        return self._closed_bytes + self._offset, self._closed_bytes + sum(left)

    def is_replaced(self) -> bool:
        """Return True if a snapshot took the place of journals, or if files were restored or repaired.

        The reader then begins again with another `FrameTail`.
        """
        if not self._files:
            return False
        if self._newest_snapshot() != self._snapshot:
            return True
        try:
            stat = self._files[-1].stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return (self._inode is not None and stat.st_ino != self._inode) or stat.st_size < self._offset

    def read(self, take: Callable[[Frame], None], until: float) -> bool:
        """Call `take` with each new record, up to the time `until` of `time.monotonic`. Return True if there is more.

        A record for which `take` raises DamagedRecordError is counted and skipped.
        """
        if not self._files:
            self._snapshot = self._newest_snapshot()
        while True:
            later = self._chain(self._snapshot)
            if self._files:
                if self._files[-1] not in later:
                    return False  # `is_replaced` says so
                # Sought before the current file is read: a file that has a later one does not grow any more.
                later = later[later.index(self._files[-1]) + 1 :]
                try:
                    if self._read_current(take, until, is_newest=not later):
                        return True
                except OSError as error:
                    self.faults.unreadable(self._files[-1], error)
                    return False
            if not later:
                return False
            self._closed_bytes += self._offset
            self._files.append(later[0])
            self._offset, self._inode = 0, None

    def body_at(self, file: int, offset: int) -> memoryview:
        """Return kind and payload of a record that `read` handed on. Raise BadRequestError if it is gone."""
        path = self._files[file]
        try:
            with path.open("rb", buffering=0) as opened:
                length, checksum = FRAME.unpack(os.pread(opened.fileno(), FRAME.size, offset))
                body = os.pread(opened.fileno(), length, offset + FRAME.size) if length <= self._longest else b""
        except (OSError, struct.error) as error:
            raise BadRequestError(f"Cannot read {path}: {error}.") from None
        if not body or zlib.crc32(body) != checksum:
            raise BadRequestError(f"{path}, byte {offset}: the record is not there any more. The store has changed.")
        return memoryview(body)

    # -- files ----------------------------------------------------------------------------------------------

    def _chain(self, snapshot: int | None) -> list[Path]:
        """Return a snapshot and the journals after it, in order."""
        journals = [number for number in self._numbers("journal") if number >= (snapshot or 0)]
        names = [] if snapshot is None else [f"snapshot-{snapshot:08d}.log"]
        return [self._folder / name for name in [*names, *(f"journal-{number:08d}.log" for number in journals)]]

    def _newest_snapshot(self) -> int | None:
        return max(self._numbers("snapshot"), default=None)

    def _numbers(self, kind: str) -> list[int]:
        try:
            names = (_NAME.fullmatch(name) for name in os.listdir(self._folder))
        except OSError:
            return []
        return sorted(int(found[2]) for found in names if found is not None and found[1] == kind)

    # -- records --------------------------------------------------------------------------------------------

    def _read_current(self, take: Callable[[Frame], None], until: float, *, is_newest: bool) -> bool:
        """Read the current file up to its end or to the time. Return True if the time is over."""
        path = self._files[-1]
        with path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            self._inode = stat.st_ino
            while self._offset < stat.st_size:
                if not self._read_piece(file.fileno(), stat.st_size, take) and not self._skip(
                    file.fileno(), stat.st_size, is_newest=is_newest
                ):
                    return False
                if time.monotonic() >= until:
                    return self._offset < stat.st_size or not is_newest
        return False

    def _read_piece(self, fd: int, size: int, take: Callable[[Frame], None]) -> bool:
        """Hand on some records. Return False if the next one is damaged or not complete."""
        start = self._offset
        data = memoryview(os.pread(fd, _CHUNK, start))
        while self._offset < size:
            at = self._offset - start
            if len(data) - at < FRAME.size:
                return at > 0
            length, checksum = FRAME.unpack_from(data, at)
            end = self._offset + FRAME.size + length
            if not 1 <= length < LARGEST or end > size:
                return at > 0 and end > size
            body = data[at + FRAME.size : at + FRAME.size + length]
            if len(body) < length:
                if at > 0:
                    return True  # the next piece begins with this record
                if length > self._longest:
                    self._damage(f"the record has {length:,} bytes, too many to be shown")
                    self._offset = end
                    return True
                body = memoryview(os.pread(fd, length, self._offset + FRAME.size))
            if zlib.crc32(body) != checksum:
                if end >= size or not self._is_record(fd, end, size):
                    return False
                self._damage("the checksum is wrong")
            else:
                try:
                    take(Frame(len(self._files) - 1, self._offset, body))
                except DamagedRecordError as error:
                    self._damage(str(error))
            self._offset = end
        return True

    def _is_record(self, fd: int, offset: int, size: int) -> bool:
        """Return True if a whole record begins at `offset`."""
        head = os.pread(fd, FRAME.size, offset)
        if len(head) < FRAME.size:
            return False
        length, checksum = FRAME.unpack(head)
        if not 1 <= length <= self._longest or offset + FRAME.size + length > size:
            return False
        return zlib.crc32(os.pread(fd, length, offset + FRAME.size)) == int(checksum)

    def _skip(self, fd: int, size: int, *, is_newest: bool) -> bool:
        """Go on behind a damaged place, with the next whole record of the file or at its end.

        Return False if the place may be no damage: a server writes the record now, or the last server was killed, and
        the next one cuts its last record off.
        """
        if is_newest and (self._sought == (self._offset, size) or is_claimed(self._folder / LOCK) is not False):
            return False
        self._sought = self._offset, size
        found = self._next_record(fd, size)
        if found is None and is_newest:
            return False
        end = size if found is None else found
        self._damage(f"{end - self._offset:,} bytes are damaged")
        self._offset = end
        return True

    def _next_record(self, fd: int, size: int) -> int | None:
        """Return the place of the next whole record, None if there is none in the file."""
        start = self._offset + 1
        while start < size:
            data = os.pread(fd, _CHUNK, start)
            for offset in possible_records(data, 0):
                if self._is_record(fd, start + offset, size):
                    return start + offset
            if len(data) <= _OVERLAP:
                return None
            start += len(data) - _OVERLAP
        return None

    def _damage(self, text: str) -> None:
        self.faults.skip(f"{self._files[-1]}, byte {self._offset}: {text}.")


def current_size(folder: Path) -> int | None:
    """Return the bytes of the last journal if the server was closed; None while it runs and after it was killed."""
    try:
        with (folder / "current").open("rb") as file:
            record, _ = read_record(file.read(_CHUNK), 0)
    except (OSError, DamagedRecordError):
        return None
    return record.size if isinstance(record, CurrentRecord) else None
