"""`SegmentTail`: follows the segments of one path (`files.segments`) while another process appends to them.

A reader calls `read` again and again; each call hands on the whole lines that are new, with their places, and reads
nothing twice. A line that was handed on is read again with `line_at`. Nothing is written, and no lock is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from verl_server.errors import BadRequestError
from verl_server.files.following import Faults, size_of
from verl_server.files.segments import segment_files

LONGEST = 4 * 2**20
"""Default of the bytes of a line beyond which it is skipped."""
_AT_ONCE = 64 * 2**20
_CHUNK = 2**20
_MARK = 64
"""Bytes before the place that is reached which say that the file is still the same."""


class Line(NamedTuple):
    """A whole line and its place."""

    file: int
    """Number of the file among those that the tail has read, for `line_at`."""
    offset: int
    data: bytes
    where: str
    """FILE, byte OFFSET: for messages."""


class SegmentTail:
    def __init__(self, path: Path, longest: int = LONGEST) -> None:
        """`path` is the first segment, which need not exist yet. A line above `longest` bytes is skipped as damaged."""
        self.path = path
        self.faults = Faults()
        """The lines that were skipped, and files that could not be read."""
        self._longest = longest
        self._files: list[Path] = []
        """The segments that were read, the current one is the last."""
        self._closed_bytes = 0
        """Bytes of the segments before the current one."""
        self._offset = 0
        self._searched = 0
        """Bytes behind `_offset` that are known to have no line end."""
        self._mark = b""
        """The last bytes before `_offset`."""
        self._inode: int | None = None
        """None: the current segment was not opened yet."""

    @property
    def position(self) -> int:
        """Bytes of all segments that were read."""
        return self._closed_bytes + self._offset

    @property
    def size(self) -> int:
        """Bytes of all segments that were read or can be read now."""
        current = self._files[-1] if self._files else None
        sizes = [size_of(file) for file in segment_files(self.path) if current is None or file not in self._files[:-1]]
        return self._closed_bytes + sum(sizes)

    def is_replaced(self) -> bool:
        """Return True if the lines before the place that is reached are not those that were read.

        The reader then forgets what it knows, and begins again with another `SegmentTail`.
        """
        if self._inode is None:
            return False
        try:
            with self._files[-1].open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    return True
                return os.pread(file.fileno(), len(self._mark), self._offset - len(self._mark)) != self._mark
        except FileNotFoundError:
            return not self._later()  # the writer of a bounded file removes the oldest segments
        except OSError:
            return False  # `read` reports it

    def read(self, take: Callable[[Line], None], most_bytes: int = _AT_ONCE) -> bool:
        """Call `take` with the new lines, until about `most_bytes` were read. Return True if more can be read now.

        A line for which `take` raises BadRequestError is counted and skipped, unless it is the last one of all: it may
        be whole at the next call.
        """
        end = self.position + most_bytes
        while self.position < end:
            later = self._later()  # before the current segment is read: what is found now is its end
            try:
                if self._files and self._read_current(take, end, is_newest=not later):
                    continue
            except FileNotFoundError:
                pass
            except OSError as error:
                self.faults.unreadable(self._files[-1], error)
                return False
            if not later:
                return False
            self._closed_bytes += self._offset
            self._files.append(later[0])
            self._offset = self._searched = 0
            self._mark, self._inode = b"", None
        return True

    def line_at(self, file: int, offset: int) -> bytes:
        """Return a line that `read` handed on. Raise BadRequestError if its file was removed or cannot be read."""
        path = self._files[file]
        try:
            with path.open("rb") as opened:
                opened.seek(offset)
                return opened.readline(self._longest)
        except OSError as error:
            raise BadRequestError(f"Cannot read {path}: {error.strerror or error}.") from None

    def _later(self) -> list[Path]:
        """Return the segments after the current one."""
        found = segment_files(self.path)
        if not self._files:
            return found
        current = self._files[-1]
        return found[found.index(current) + 1 :] if current in found else [f for f in found if f not in self._files]

    def _read_current(self, take: Callable[[Line], None], end: int, *, is_newest: bool) -> bool:
        """Read a piece of the current segment. Return False at its end."""
        path = self._files[-1]
        with path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            self._inode = stat.st_ino
            if stat.st_size < self._offset + self._searched:  # the writer removed the part of a line
                self._searched = 0
            while self.position < end:
                chunk = os.pread(file.fileno(), _CHUNK, self._offset + self._searched)
                if not chunk:
                    return False
                if (cut := chunk.rfind(b"\n") + 1) == 0:
                    self._searched += len(chunk)
                    continue
                if self._searched > self._longest:
                    cut = chunk.find(b"\n") + 1
                    self.faults.skip(f"{path}, byte {self._offset}: the line has more than {self._longest:,} bytes.")
                    self._advance(self._searched + cut, chunk[:cut])
                    continue
                data = os.pread(file.fileno(), self._searched, self._offset) + chunk[:cut] if self._searched else chunk
                is_end = is_newest and self._offset + self._searched + cut >= stat.st_size
                if not self._take(path, data[: self._searched + cut], take, is_end):
                    return False
        return True

    def _take(self, path: Path, data: bytes, take: Callable[[Line], None], is_end: bool) -> bool:
        """Hand on the lines of `data`. Return False if the last one of all cannot be read yet."""
        start = 0
        while start < len(data):
            stop = data.index(b"\n", start) + 1
            offset = self._offset
            line = Line(len(self._files) - 1, offset, data[start:stop], f"{path}, byte {offset}")
            try:
                take(line)
            except BadRequestError as error:
                if is_end and stop == len(data):
                    return False
                self.faults.skip(str(error))
            self._advance(stop - start, line.data)
            start = stop
        return True

    def _advance(self, count: int, data: bytes) -> None:
        self._offset += count
        self._searched = 0
        self._mark = data[-_MARK:]
