"""Reads files of lines for an index: from an offset on, in bounded pieces, and tells a file that was replaced."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

MOST_LINE_BYTES = 64 * 2**20
"""A longer line counts as damaged, so that no line takes much memory."""
_DIGESTED = 4096
_BUFFER = 2**20


def read_lines(file: Path, offset: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (offset, length, line) of the whole lines from `offset` on; None for a line that is too long.

    A last line without an end is left out: it may still be written. Raise OSError if the file cannot be read.
    """
    with file.open("rb", buffering=_BUFFER) as source:
        source.seek(offset)
        while line := source.readline(MOST_LINE_BYTES + 1):
            length = len(line)
            if line.endswith(b"\n"):
                yield offset, length, line
            elif length <= MOST_LINE_BYTES:
                return
            else:
                while not line.endswith(b"\n"):
                    line = source.readline(_BUFFER)
                    length += len(line)
                    if not line:
                        return
                yield offset, length, None
            offset += length


def read_line(file: Path, offset: int, length: int) -> bytes | None:
    """Return the line at a place, or None if no line begins and ends there any more."""
    try:
        with file.open("rb", buffering=0) as source:
            before = os.pread(source.fileno(), 1, offset - 1) if offset else b"\n"
            parts = []
            while length > 0 and (part := os.pread(source.fileno(), length, offset)):
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
    except OSError:
        return None
    line = b"".join(parts)
    return line if before == b"\n" and length == 0 and line.endswith(b"\n") else None


def digest_before(file: Path, end: int) -> str | None:
    """Return a digest of the bytes before `end`, at most 4 kB; None if the file is shorter or cannot be read."""
    start = max(0, end - _DIGESTED)
    try:
        with file.open("rb", buffering=0) as source:
            data = os.pread(source.fileno(), end - start, start)
    except OSError:
        return None
    return hashlib.blake2b(data, digest_size=16).hexdigest() if len(data) == end - start else None
