"""Append-only files of lines that are rotated by size: NAME.jsonl, then NAME.1.jsonl, NAME.2.jsonl and so on.

A segment is never renamed, and nothing before its last whole line changes. So a reader may keep offsets into a segment
while the file grows. The newest segment has the highest number. `Segments` writes, `segment_files` and `read_segments`
read, `SegmentFollower` reads what is new, and `remove_oldest` bounds the size of several files together.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_server.errors import BadRequestError
from verl_server.files.json_files import whole_lines

SEGMENT_BYTES = 64 * 2**20
"""Default of the size at which a new segment begins."""
_TAIL = 64 * 2**10
"""Bytes that are read at once in search of the last line end."""


def segment_files(path: Path) -> list[Path]:
    """Return the segments of `path` that exist, the oldest first."""
    numbers = {_number(path, file): file for file in path.parent.glob(f"{path.stem}*{path.suffix}")}
    return [numbers[number] for number in sorted(number for number in numbers if number is not None)]


def read_segments(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (FILE:LINE, line) of all segments in order. A line that was cut off at the end of a segment is left out."""
    for file in segment_files(path):
        yield from whole_lines(file)


class SegmentFollower:
    """The reader of the segments of a path that grows. Each call of `read` goes on where the last one stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[Path, tuple[int, int]] = {}
        """Segment -> (bytes, lines) that were read."""

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Yield (FILE:LINE, line) of the whole lines that were not read before. Read all of them before the next call.

        Raise BadRequestError, which names the file, if it cannot be read.
        """
        for file in segment_files(self._path):
            offset, number = self._places.get(file, (0, 0))
            try:
                with file.open("rb") as opened:
                    opened.seek(offset)
                    for line in opened:
                        if not line.endswith(b"\n"):
                            break
                        offset, number = offset + len(line), number + 1
                        self._places[file] = offset, number
                        yield f"{file}:{number}", line
            except FileNotFoundError:  # the writer of a bounded file removed it
                continue
            except OSError as error:
                raise BadRequestError(f"Cannot read {file}: {error}") from error


def _number(path: Path, file: Path) -> int | None:
    """Return the number of a segment of `path`, 0 for `path` itself, and None for another file."""
    middle = file.name[len(path.stem) : len(file.name) - len(path.suffix)]
    if not middle:
        return 0
    digits = middle[1:]
    is_number = middle[0] == "." and digits.isascii() and digits.isdecimal() and digits[0] != "0"
    return int(digits) if is_number else None


class LinePlace(NamedTuple):
    """The place of a line in its segment."""

    file: str
    """Name of the segment."""
    offset: int
    length: int


class Segments:
    """The writer of the segments of one path. Any thread may append; only one process may."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`segment_bytes`: a segment that has lines gets no further one beyond this size."""
        self.path = path
        self._most = segment_bytes
        self._descriptor = -1
        self._newest = path
        self._size = 0
        self._lock = threading.Lock()

    def append(self, lines: Iterable[bytes]) -> list[LinePlace]:
        """Append lines, each of which ends with a line end, and hand them to the operating system. Return their places.

        Raise OSError if they cannot be written. The segment then ends with the last line that was written whole.
        """
        lines = list(lines)  # a record that cannot be encoded raises before anything is written
        if not lines:
            return []
        places = []
        with self._lock:
            if self._descriptor < 0:
                self._open_newest()
            pending: list[bytes] = []
            size = self._size
            for line in lines:
                if size and size + len(line) > self._most:
                    self._write(b"".join(pending))
                    pending, size = [], 0
                    self._rotate()
                pending.append(line)
                places.append(LinePlace(self._newest.name, size, len(line)))
                size += len(line)
            self._write(b"".join(pending))
        return places

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open_newest(self) -> None:
        """Open the newest segment, and cut off a last line that an interruption left without an end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        existing = segment_files(self.path)
        self._open(existing[-1] if existing else self.path)
        try:
            self._size = _whole_size(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            self._close()
            raise

    def _rotate(self) -> None:
        number = (_number(self.path, self._newest) or 0) + 1
        self._close()
        self._open(self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}"))
        self._size = 0

    def _open(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._newest = file

    def _write(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException:  # also an interruption between two writes
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, _whole_size(self._descriptor))
            self._close()  # the next call opens the segment again, and cuts off what could not be cut off now
            raise
        self._size += len(data)


def _whole_size(descriptor: int) -> int:
    """Return the size of a file up to its last line end."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _TAIL)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def remove_oldest(paths: Sequence[Path], most_bytes: int) -> list[tuple[Path, int]]:
    """Remove the oldest segments of `paths` until all of them have at most `most_bytes` together.

    The newest segment of each path stays. Return (file, bytes) of the removed ones.
    """
    found = {path: segment_files(path) for path in paths}
    sizes = {file: file.stat() for files in found.values() for file in files}
    total = sum(stat.st_size for stat in sizes.values())
    closed = [file for files in found.values() for file in files[:-1]]
    removed = []
    for file in sorted(closed, key=lambda file: sizes[file].st_mtime_ns):
        if total <= most_bytes:
            break
        file.unlink()
        removed.append((file, sizes[file].st_size))
        total -= sizes[file].st_size
    return removed
