"""The files of the session store: `journal-NNNNNNNN.log`, written at the end only, and `snapshot-NNNNNNNN.log`.

Snapshot N has the live records of all files before N, and the journals from N on follow it. A snapshot is written as
`.tmp`, synced and renamed, so a snapshot with its final name is complete. `Journal` calls these methods in its threads.
Before the threads start, the server calls `open` and `records`.

The files are a chain, so that a file that was lost or cut off is detected: their numbers have no gaps, the header of a
journal has the size of the preceding file, a snapshot ends with its number of records, and the file `current` names the
last journal. If the server was closed, `current` also has the size of the last journal. `journal_repair` reads the same
chain to give up lost records.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.durable import make_folder
from verl_server.files.json_files import read_bytes
from verl_server.server.sessions.records import (
    FORMAT,
    CurrentRecord,
    CutRecord,
    DamagedRecordError,
    EndRecord,
    HeaderRecord,
    framed,
    has_record,
    is_cut_off,
    read_record,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(journal|snapshot)-(\d{8})\.log")
CURRENT = "current"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
"""Flags to write a file from its beginning."""


class DamagedStoreError(VerlServerError):
    """The session store cannot be read."""


@dataclass(frozen=True)
class Damage:
    """A fault of a file of the store."""

    path: Path
    offset: int
    """Bytes of the intact records before the damage, which can be kept."""
    size: int
    """Bytes of the file, or 0 if it is missing."""
    reason: str
    is_torn_end: bool = False
    """True if the last journal of a killed server ends with an incomplete record, which was not acknowledged."""

    def __str__(self) -> str:
        return f"{self.path}, byte {self.offset}: {self.reason}"


class Disk:
    """The system calls of the store. Tests replace it by an object whose calls fail."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def close(self, fd: int) -> None:
        os.close(fd)


@dataclass
class _Read:
    """The part of a file that was read."""

    path: Path
    size: int
    """Bytes of the complete records."""
    count: int = 0
    """Number of records, the header included."""
    is_ended: bool = False
    """True if the last record is the end of a snapshot, with the right number."""
    is_given_up: bool = False
    """True if a repair gave up the rest of the file, or if its damage was reported."""


class JournalFiles:
    def __init__(self, folder: Path, header: HeaderRecord, disk: Disk | None = None) -> None:
        self._folder, self._header, self._disk = folder, header, disk or Disk()
        self._fd = self._lock = -1
        self.number = 0
        """Number of the current file."""
        self.size = 0
        """Bytes of the current file that are whole records."""
        self._is_torn = False

    # -- reading --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create and lock the folder, and remove the files of an interrupted compaction.

        Raise BadRequestError if the folder cannot be used.
        """
        make_folder(self._folder)
        self._folder.chmod(0o700)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise BadRequestError(f"session_store: another server uses the folder {self._folder}.") from None
        for path in self._folder.glob("*.tmp"):
            self._disk.remove(path)
        self._remove_before(max(self._numbers("snapshot"), default=0))

    def records(self) -> Iterator[tuple[Any, int]]:
        """Yield all records in order, with their bytes. Cut off an incomplete record at the end of the last file.

        Raise DamagedStoreError at any other damage, and BadRequestError for the store of another model.
        """
        return self.scan(self._refuse)

    def scan(self, report: Callable[[Damage], None]) -> Iterator[tuple[Any, int]]:
        """Yield all records that can be read. `report` is called with each damage, and may raise."""
        current = self._current(report)
        before: _Read | None = None
        for path, kind, number in self._expected(current):
            if not path.exists():
                report(Damage(path, 0, 0, "the file is missing"))
                before = _Read(path, 0, is_given_up=True)
                continue
            is_last = kind == "journal" and number == max(self._numbers("journal"))
            # Fewest records of a last journal that ends in a part of one: `current` is written behind the header.
            fewest = 0 if current.number < number else 1
            may_be_torn = is_last and current.number <= number and (fewest == 0 or current.size is None)
            read = _Read(path, 0)
            data = read_bytes(path)
            found: list[Damage] = []
            for record, size in self._read(data, read, found, fewest if may_be_torn else None):
                if read.count == 1:
                    self._check_header(path, record)
                    if record.number not in (None, number):
                        found.append(Damage(path, 0, len(data), f"it is file {record.number} under another name"))
                        break
                    self._check_previous(path, number, record, before, report)
                elif not isinstance(record, EndRecord):
                    yield record, size
            if not found and kind == "snapshot" and not read.is_ended:
                found.append(Damage(path, read.size, len(data), "the snapshot is not complete"))
            if not found and not read.count and not (is_last and current.number < number):
                found.append(Damage(path, 0, 0, "the file is empty"))
            if is_last and current.number == number and current.size not in (None, read.size) and not read.is_given_up:
                text = f"the file has {len(data):,} bytes, and had {current.size:,} when the server was closed"
                found.append(Damage(path, read.size, len(data), text))
            if 0 < current.number < number and read.count > 1:
                text = f"the file has records, and {CURRENT} names journal {current.number} as the last one"
                found.append(Damage(path, 0, len(data), text))
            for damage in found[:1]:
                report(damage)
                read.is_given_up = True
            before = read

    def _read(self, data: bytes, read: _Read, found: list[Damage], fewest: int | None) -> Iterator[tuple[Any, int]]:
        """Yield (record, bytes) for each record of a file, up to the first damaged record.

        An incomplete record counts as a torn end if at least `fewest` records precede the record. If `fewest` is None,
        an incomplete record is damage.
        """
        while read.size < len(data):
            try:
                record, end = read_record(data, read.size)
            except DamagedRecordError as error:
                is_torn = fewest is not None and read.count >= fewest and is_cut_off(data, read.size)
                found.append(Damage(read.path, read.size, len(data), str(error), is_torn))
                return
            read.is_ended = isinstance(record, EndRecord) and record.records == read.count
            read.is_given_up = isinstance(record, CutRecord)
            read.count += 1
            size, read.size = end - read.size, end
            yield record, size

    def _current(self, report: Callable[[Damage], None]) -> CurrentRecord:
        """Return the content of the file `current`. If it is missing and the store has records, report the damage.

        The first start may have ended before the file was written.
        """
        path = self._folder / CURRENT
        if not path.exists():
            if any([self._has_records(number) or number > 1 for number in self._numbers("journal")]):
                report(Damage(path, 0, 0, "the file is missing"))
            return CurrentRecord(0, None)
        try:
            record, _ = read_record(read_bytes(path), 0)
            if not isinstance(record, CurrentRecord):
                raise DamagedRecordError("it is another record")
            return record
        except DamagedRecordError as error:
            report(Damage(path, 0, path.stat().st_size, str(error)))
        return CurrentRecord(0, None)

    def _has_records(self, number: int) -> bool:
        """Return True if a journal has more than its header. Raise BadRequestError for another format."""
        path = self._path("journal", number)
        data = read_bytes(path)
        try:
            record, end = read_record(data, 0)
        except DamagedRecordError:
            return has_record(data, 1)
        self._check_header(path, record)
        return end < len(data)

    def _expected(self, current: CurrentRecord) -> list[tuple[Path, str, int]]:
        """Return (path, kind, number) of the newest snapshot and of the journals after it, including lost journals."""
        snapshot, journals = max(self._numbers("snapshot"), default=None), self._numbers("journal")
        last = max([*journals, current.number])
        first = snapshot if snapshot is not None else min(journals, default=max(last, 1))
        expected = [] if snapshot is None else [(self._path("snapshot", snapshot), "snapshot", snapshot)]
        numbers = range(first, max(last, snapshot or 0) + 1)
        return expected + [(self._path("journal", number), "journal", number) for number in numbers]

    def _check_previous(
        self, path: Path, number: int, header: HeaderRecord, before: _Read | None, report: Callable[[Damage], None]
    ) -> None:
        """Compare the header of a journal with the file before it."""
        if path.name.startswith("snapshot"):
            return
        if header.previous is None:
            if header.number is None and before is not None and before.path.name.startswith("journal"):
                report(
                    Damage(path, 0, path.stat().st_size, "it is the first file of a store, and another is before it")
                )
        elif before is None:
            text = "the file is missing, and there is no snapshot in its place"
            report(Damage(self._path("journal", number - 1), 0, 0, text))
        elif before.path.name.startswith("journal") and not before.is_given_up and before.size != header.previous:
            text = f"the file has {before.size:,} bytes instead of {header.previous:,}"
            report(Damage(before.path, before.size, before.size, text))

    def _refuse(self, damage: Damage) -> None:
        if damage.is_torn_end:
            self._cut(damage.path, damage.offset, damage.size - damage.offset)
            return
        raise DamagedStoreError(
            f"The session store is damaged: {damage}. Restore the file, or give up what was lost: "
            f"verl-server trajectories repair {self._folder}"
        )

    def _cut(self, path: Path, size: int, lost: int) -> None:
        logger.warning("The session store ends in a record that was cut off: %d bytes of %s are removed.", lost, path)
        with self._opened(path, os.O_WRONLY) as fd:
            self._disk.truncate(fd, size)
            self._disk.sync(fd)

    def _check_header(self, path: Path, record: Any) -> None:
        if not isinstance(record, HeaderRecord):
            raise DamagedStoreError(f"{path} is no journal: it does not begin with a header.")
        if record.format != FORMAT:
            raise BadRequestError(
                f"session_store: {path} has format {record.format}, and this version writes format {FORMAT}. Name "
                "another folder; the version that wrote the store can still export its trajectories."
            )
        if (record.vocabulary, record.tokenizer) != (self._header.vocabulary, self._header.tokenizer):
            raise BadRequestError(
                f"session_store: {path} was written with the tokenizer of {record.model_path}, which is another one. "
                "Use another folder."
            )

    # -- writing --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a new file, which follows all other files, and write its header."""
        self.number = max([*self._numbers("journal"), *self._numbers("snapshot"), 0])
        last = self._path("journal", self.number)
        if last.exists() and last.stat().st_size == 0:
            self._disk.remove(last)
            self.number -= 1
            last = self._path("journal", self.number)
        self.size = last.stat().st_size if last.exists() else -1
        self.rotate()

    def rotate(self) -> None:
        """Sync and close the current file, and begin the next one."""
        if self._fd >= 0:
            self.sync()
        number = self.number + 1
        previous = self.size if self.size >= 0 else None
        head = framed(msgspec.structs.replace(self._header, previous=previous, number=number))
        path = self._path("journal", number)
        fd = self._disk.open(path, _NEW)
        try:
            self._write_all(fd, head)
            self._disk.sync(fd)
            self._sync_folder()
            self._write_current(number, None)
        except OSError:
            self._disk.close(fd)
            self._disk.remove(path)  # the current file goes on, and only the last file may end in half a record
            raise
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self.number, self.size = fd, number, len(head)

    def _write_current(self, number: int, size: int | None) -> None:
        temporary = self._folder / f"{CURRENT}.tmp"
        with self._opened(temporary, _NEW) as fd:
            self._write_all(fd, framed(CurrentRecord(number, size)))
            self._disk.sync(fd)
        self._disk.rename(temporary, self._folder / CURRENT)
        self._sync_folder()

    def append(self, data: bytes) -> None:
        """Write complete records. Raise OSError if the write fails.

        After an error the records are not in the file, and the caller must try again.
        """
        if self._is_torn:
            self._disk.truncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
        self._is_torn = True
        self._write_all(self._fd, data)
        self._is_torn = False
        self.size += len(data)

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._disk.write(fd, view[: 2**24]) :]

    def sync(self) -> None:
        try:
            self._disk.sync(self._fd)
        except OSError:
            self._is_torn = True  # the system may have dropped what it could not write
            raise

    def close(self) -> None:
        """Flush the current file, record its size, close it, and release the lock of the folder.

        If an earlier write or flush failed, no size is recorded. An OSError is logged, not raised.
        """
        try:
            if self._fd >= 0 and not self._is_torn:
                self.sync()
                self._write_current(self.number, self.size)
        except OSError as error:
            logger.error("The end of the session store could not be written: %s.", error)
        finally:
            if self._fd >= 0:
                self._disk.close(self._fd)
                self._fd = -1
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    # -- compaction -----------------------------------------------------------------------------------------

    def compact(self, number: int, lives: Callable[[Any], bool]) -> int:
        """Replace all files before journal `number` by a snapshot of the live records.

        Return the size of the snapshot in bytes.
        """
        temporary, name = self._folder / f"snapshot-{number:08d}.tmp", self._path("snapshot", number)
        size = count = 0
        with self._opened(temporary, _NEW) as fd:
            header = msgspec.structs.replace(self._header, number=number)
            for record in (header, *self._closed(number, lives)):
                size, count = size + self._put(fd, record), count + 1
            size += self._put(fd, EndRecord(count))
            self._disk.sync(fd)
        self._disk.rename(temporary, name)
        self._sync_folder()
        self._remove_before(number)
        return size

    def _closed(self, number: int, lives: Callable[[Any], bool]) -> Iterator[Any]:
        for path, kind, each in self._expected(CurrentRecord(0, None)):
            if kind == "journal" and each >= number:
                continue
            data, offset = path.read_bytes(), 0
            while offset < len(data):
                record, offset = read_record(data, offset)
                if not isinstance(record, HeaderRecord | EndRecord) and (
                    isinstance(record, CutRecord) or lives(record)
                ):
                    yield record

    def _put(self, fd: int, record: Any) -> int:
        data = framed(record)
        self._write_all(fd, data)
        return len(data)

    def _remove_before(self, number: int) -> None:
        for kind in ("journal", "snapshot"):
            for each in self._numbers(kind):
                if each < number:
                    self._disk.remove(self._path(kind, each))

    # -- names ----------------------------------------------------------------------------------------------

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:08d}.log"

    def _numbers(self, kind: str) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(found[2]) for found in names if found is not None and found[1] == kind)

    def _sync_folder(self) -> None:
        with self._opened(self._folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self._disk.sync(fd)

    @contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file or a folder, and close it at the end."""
        fd = self._disk.open(path, flags)
        try:
            yield fd
        finally:
            self._disk.close(fd)
