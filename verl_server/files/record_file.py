"""A file of records that are durable one by one: `RecordFile` appends, `read_records` reads.

A record on disk is

    MAGIC | u32 length | u32 crc32 of length and payload | payload       (little-endian)

Each record is flushed to the disk before the next one is written. So an interruption damages the last record at most,
which was never acknowledged, and `read_records` leaves it out. Damage before an intact record is another matter: what
was durable is lost, and the reader raises an error. `train.journal` and `train.turn_journal` write such
files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_server.errors import BadRequestError
from verl_server.files.durable import flush, replace_file
from verl_server.files.json_files import read_bytes

logger = logging.getLogger(__name__)

_MAGIC = b"\xc1rec"
"""Begins each record. The byte 0xc1 begins no value of msgpack."""
_HEAD = struct.Struct("<4sII")


class Place(NamedTuple):
    """The place of a record in its file, with its head."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def read_records(path: Path) -> Iterator[tuple[Place, bytes]]:
    """Yield the place and the payload of each record; nothing if there is no file.

    A damaged end is left out with a warning. Raise BadRequestError, which names the file, if an intact record follows
    the damage, or if the file cannot be read.
    """
    if not path.exists():
        return
    data, offset = read_bytes(path), 0
    while offset < len(data):
        place = _place(data, offset)
        if place is None:
            _check_that_nothing_follows(path, data, offset)
            return
        yield place, data[offset + _HEAD.size : offset + place.length]
        offset += place.length


def _place(data: bytes, offset: int) -> Place | None:
    """Return the place of the record at `offset`, or None if no intact one begins there."""
    if len(data) - offset < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(data, offset)
    start = offset + _HEAD.size
    if magic != _MAGIC or start + length > len(data):
        return None
    if _checksum(memoryview(data)[start : start + length]) != checksum:
        return None
    return Place(offset, _HEAD.size + length)


def _record(payload: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes | memoryview) -> int:
    """Return a checksum that is not 0 for an empty payload: a loss of power may leave zeros after the magic bytes."""
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))


def _check_that_nothing_follows(path: Path, data: bytes, offset: int) -> None:
    """Log that the file is damaged from `offset` on. Raise BadRequestError if an intact record follows."""
    following = offset
    while (following := data.find(_MAGIC, following + 1)) >= 0:
        if _place(data, following) is not None:
            raise BadRequestError(
                f"{path} is damaged at byte {offset}, and intact records follow at byte {following}. Restore the file, "
                "or remove it to continue without its records."
            )
    logger.warning("The last record of %s, at byte %d, was not written completely. It is left out.", path, offset)


class RecordFile:
    """The writer of one file. One thread at a time may call it, and only one process may write the file."""

    def __init__(self, path: Path) -> None:
        """Nothing is read or created before the first call."""
        self.path = path
        self._descriptor = -1
        self._size: int | None = None
        """Bytes of the records that are durable. None: the file was not read."""

    def read(self) -> list[tuple[Place, bytes]]:
        """Return the records of the file, as `read_records` does. Records are appended after them."""
        found = list(read_records(self.path))
        self._size = found[-1][0].end if found else 0
        return found

    def append(self, payload: bytes) -> Place:
        """Append a record, and return its place when it is on the disk.

        Raise OSError if it is not. The file then ends with the record before, at the latest after the next call.
        """
        record = _record(payload)
        descriptor, size = self._opened()
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except BaseException:
            # After a failed fsync, the system may have dropped what it could not write: nothing of it may be believed.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            self.close()  # the next call opens the file again, and cuts off what could not be cut off now
            raise
        self._size = size + len(record)
        return Place(size, len(record))

    def keep(self, places: Sequence[Place]) -> list[Place]:
        """Write the file anew with these records only, complete or not at all, and return their new places.

        Raise OSError if it cannot be written. The file then stays as it is.
        """
        descriptor, _ = self._opened()
        return self._replace(os.pread(descriptor, place.length, place.offset) for place in places)

    def rewrite(self, payloads: Iterable[bytes]) -> list[Place]:
        """Write the file anew with records of these payloads, as `keep` does."""
        self._opened()
        return self._replace(_record(payload) for payload in payloads)

    def _replace(self, records: Iterable[bytes]) -> list[Place]:
        new, kept, size = self.path.with_name(f".{self.path.name}.partial"), list[Place](), 0
        try:
            with new.open("wb") as file:
                for record in records:
                    file.write(record)
                    kept.append(Place(size, len(record)))
                    size += len(record)
            replace_file(new, self.path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self.close()
        self._size = size
        return kept

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _opened(self) -> tuple[int, int]:
        """Return the descriptor of the file, and the bytes of its records. It has nothing else."""
        if self._size is None:
            self.read()
        assert self._size is not None
        if self._descriptor < 0:
            is_new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._descriptor, self._size)
            if is_new:
                flush(self.path.parent)
        return self._descriptor, self._size
