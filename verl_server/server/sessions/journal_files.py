"""The files of the session store: `journal-NNNNNNNN.log`, written at the end only, and `snapshot-NNNNNNNN.log`.

A snapshot N holds what lives of all files before N, and the journals from N on follow it. It is complete once it has
its name: it is written as `.tmp`, synced and renamed. `Journal` calls these methods in its threads; before they start,
the server calls `open` and `records`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.server.sessions.records import (
    FORMAT,
    DamagedRecordError,
    EndRecord,
    HeaderRecord,
    frame,
    payload,
    read_record,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(journal|snapshot)-(\d{8})\.log")
_SEARCH = 4 * 2**20
"""Bytes behind a damaged record that are searched for a sound one."""


class DamagedStoreError(VerlServerError):
    """The session store cannot be read."""


class Disk:
    """The system calls of the store. Tests replace it by one that fails."""

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


class JournalFiles:
    def __init__(self, folder: Path, header: HeaderRecord, disk: Disk | None = None) -> None:
        self._folder, self._header, self._disk = folder, header, disk or Disk()
        self._fd = self._lock = -1
        self._number = 0
        self._size = 0
        """Bytes of the current file that are whole records."""
        self._is_torn = False

    @property
    def size(self) -> int:
        """Bytes of the current file."""
        return self._size

    # -- reading --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make and lock the folder, and remove what an interrupted compaction left. Raise BadRequestError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        for path, is_last in self._files():
            data = path.read_bytes()
            offset = 0
            while offset < len(data):
                try:
                    record, end = read_record(data, offset)
                except DamagedRecordError as error:
                    if not is_last or self._continues(data, offset):
                        raise DamagedStoreError(
                            f"The session store is damaged: {path}, byte {offset}: {error}. To lose what follows in "
                            f"this file and keep a copy of it: verl-server trajectories repair {self._folder}"
                        ) from None
                    self._cut(path, offset, len(data) - offset)
                    break
                if offset == 0:
                    self._check_header(path, record)
                elif not isinstance(record, EndRecord):
                    yield record, end - offset
                offset = end

    def _files(self) -> list[tuple[Path, bool]]:
        """Return the snapshot and the journals that follow it. True for the last journal, which may end anywhere."""
        snapshots = self._numbers("snapshot")
        paths = [self._path("snapshot", max(snapshots))] if snapshots else []
        first = max(snapshots, default=0)
        paths += [self._path("journal", number) for number in self._numbers("journal") if number >= first]
        return [(path, i == len(paths) - 1 and path.name.startswith("journal")) for i, path in enumerate(paths)]

    def _continues(self, data: bytes, damaged: int) -> bool:
        """Return True if a sound record follows the damaged one, which is then no record that was cut off."""
        for offset in range(damaged + 1, min(len(data), damaged + _SEARCH)):
            if len(data) - offset > 9 and 1 <= data[offset + 8] <= 9 and data[offset + 3] == 0:
                try:
                    read_record(data, offset)
                except DamagedRecordError:
                    continue
                return True
        return False

    def _cut(self, path: Path, size: int, lost: int) -> None:
        logger.warning("The session store ends in a record that was cut off: %d bytes of %s are removed.", lost, path)
        fd = self._disk.open(path, os.O_WRONLY)
        try:
            self._disk.truncate(fd, size)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def _check_header(self, path: Path, record: Any) -> None:
        if not isinstance(record, HeaderRecord) or record.format != FORMAT:
            raise DamagedStoreError(f"{path} is no journal of format {FORMAT}.")
        if (record.vocabulary, record.tokenizer) != (self._header.vocabulary, self._header.tokenizer):
            raise BadRequestError(
                f"session_store: {path} was written with the tokenizer of {record.model_path}, which is another one. "
                "Use another folder."
            )

    # -- writing --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a new file behind all others, and write its header."""
        self._number = max([*self._numbers("journal"), *self._numbers("snapshot"), 0])
        last = self._path("journal", self._number)
        if last.exists() and last.stat().st_size == 0:
            self._disk.remove(last)
            self._number -= 1
        self.rotate()

    def rotate(self) -> None:
        """Sync and close the current file, and begin the next one."""
        if self._fd >= 0:
            self._disk.sync(self._fd)
        head = payload(self._header)
        head = frame(head) + head
        number = self._number + 1
        path = self._path("journal", number)
        fd = self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._write_all(fd, head)
            self._sync_folder()
        except OSError:
            self._disk.close(fd)
            self._disk.remove(path)  # the current file goes on, and only the last file may end in half a record
            raise
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self._number, self._size = fd, number, len(head)

    def append(self, data: bytes) -> None:
        """Write whole records. Raise OSError; the records are then not in the file, and the caller has to try again."""
        if self._is_torn:
            self._disk.truncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            self._is_torn = False
        self._is_torn = True
        self._write_all(self._fd, data)
        self._is_torn = False
        self._size += len(data)

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._disk.write(fd, view[: 2**24]) :]

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- compaction -----------------------------------------------------------------------------------------

    def compact(self, number: int, lives: Callable[[Any], bool]) -> int:
        """Replace all files before journal `number` by a snapshot of the records that live. Return its bytes."""
        temporary, name = self._folder / f"snapshot-{number:08d}.tmp", self._path("snapshot", number)
        fd = self._disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        size = count = 0
        try:
            for record in (self._header, *self._closed(number, lives)):
                size, count = size + self._put(fd, record), count + 1
            size += self._put(fd, EndRecord(count))
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        self._disk.rename(temporary, name)
        self._sync_folder()
        self._remove_before(number)
        return size

    @property
    def number(self) -> int:
        """Number of the current file."""
        return self._number

    def _closed(self, number: int, lives: Callable[[Any], bool]) -> Iterator[Any]:
        for path, _ in self._files():
            found = _NAME.fullmatch(path.name)
            if found is None or (found[1] == "journal" and int(found[2]) >= number):
                continue
            data, offset = path.read_bytes(), 0
            while offset < len(data):
                record, offset = read_record(data, offset)
                if not isinstance(record, HeaderRecord | EndRecord) and lives(record):
                    yield record

    def _put(self, fd: int, record: Any) -> int:
        body = payload(record)
        self._write_all(fd, frame(body) + body)
        return len(body) + 8

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
        fd = self._disk.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            self._disk.close(fd)
