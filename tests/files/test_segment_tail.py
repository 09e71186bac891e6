"""A reader that follows segments gets each whole line once, with its place, whatever the writer does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.errors import BadRequestError
from verl_server.files.segment_tail import Line, SegmentTail
from verl_server.files.segments import Segments, segment_files


class Reader:
    def __init__(self, path: Path, longest: int = 1000) -> None:
        self.tail = SegmentTail(path, longest)
        self.lines: list[Line] = []

    def read(self) -> list[bytes]:
        """Return the new lines. A line that begins with "bad" is refused."""
        before = len(self.lines)
        assert not self.tail.read(self._take)
        return [line.data for line in self.lines[before:]]

    def _take(self, line: Line) -> None:
        if line.data.startswith(b"bad"):
            raise BadRequestError(f"{line.where}: bad")
        self.lines.append(line)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


def test_each_line_is_handed_on_once_over_segments(path: Path) -> None:
    reader, log = Reader(path), Segments(path, segment_bytes=30)
    assert reader.read() == []
    for first in range(0, 50, 7):
        written = [b"%08d\n" % number for number in range(first, first + 7)]
        log.append(written)
        assert reader.read() == written
        assert reader.tail.position == reader.tail.size == sum(f.stat().st_size for f in segment_files(path))
    assert reader.read() == [] and not reader.tail.is_replaced()
    again = [reader.tail.line_at(line.file, line.offset) for line in reader.lines]
    assert again == [line.data for line in reader.lines]
    whole = Reader(path)
    assert whole.read() == again, "a reader that comes late gets the same"
    log.close()


def test_a_line_without_an_end_waits_and_may_be_written_again(path: Path) -> None:
    reader = Reader(path)
    append(path, b"one\ntw")
    assert reader.read() == [b"one\n"] and reader.tail.position == 4
    path.write_bytes(b"one\n")  # the writer cuts off what it could not write
    assert reader.read() == [] and not reader.tail.is_replaced()
    append(path, b"2\nthree\n")
    assert reader.read() == [b"2\n", b"three\n"]
    append(path, b"cut off")
    append(path.with_name("a.1.jsonl"), b"four\n")
    assert reader.read() == [b"four\n"], "nothing follows in a segment that has a later one"
    assert reader.tail.faults.damaged == 0


def test_a_damaged_line_is_counted_unless_it_is_the_last_of_all(path: Path) -> None:
    reader = Reader(path)
    append(path, b"one\nbad1\ntwo\nbad2\n")
    assert reader.read() == [b"one\n", b"two\n"] and reader.tail.faults.damaged == 1
    assert reader.read() == [] and reader.tail.faults.damaged == 1
    path.write_bytes(path.read_bytes().replace(b"bad2", b"good"))
    assert reader.read() == [b"good\n"], "it was not whole yet"
    append(path, b"bad3\n")
    append(path.with_name("a.1.jsonl"), b"three\n")
    assert reader.read() == [b"three\n"] and reader.tail.faults.damaged == 2
    assert reader.tail.faults.warnings == [f"{path}, byte 4: bad", f"{path}, byte 18: bad"]


def test_a_line_that_is_too_long_is_skipped_in_bounded_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.files.segment_tail._CHUNK", 64)
    reader = Reader(path, longest=200)
    append(path, b"one\n" + b"x" * 150 + b"\n" + b"y" * 500)
    assert reader.read() == [b"one\n", b"x" * 150 + b"\n"], "longer than what is read at once"
    append(path, b"y" * 500)
    assert reader.read() == [] and reader.tail.faults.damaged == 0
    append(path, b"y\ntwo\n")
    assert reader.read() == [b"two\n"] and reader.tail.faults.damaged == 1
    assert "more than 200 bytes" in reader.tail.faults.warnings[0]
    assert not reader.tail.is_replaced()


def test_files_in_the_place_of_those_that_were_read_are_noticed(path: Path) -> None:
    reader = Reader(path)
    append(path, b"one\ntwo\n")
    reader.read()
    path.write_bytes(b"ONE\ntw0\nthree\n")  # the same inode
    assert reader.tail.is_replaced()
    path.write_bytes(b"one\n")
    assert reader.tail.is_replaced()
    path.unlink()
    assert reader.tail.is_replaced()


def test_the_oldest_segments_may_be_removed(path: Path) -> None:
    reader, log = Reader(path), Segments(path, segment_bytes=4)
    log.append([b"one\n", b"two\n"])
    assert reader.read() == [b"one\n", b"two\n"]
    path.unlink()
    log.append([b"three\n"])
    path.with_name("a.1.jsonl").unlink()
    assert not reader.tail.is_replaced()
    assert reader.read() == [b"three\n"]
    with pytest.raises(BadRequestError, match=r"Cannot read .*a\.jsonl"):
        reader.tail.line_at(0, 0)
    log.close()


def test_a_bounded_read_goes_on_where_it_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.files.segment_tail._CHUNK", 64)
    Segments(path, segment_bytes=300).append([b"%08d\n" % number for number in range(100)])
    tail, found, calls = SegmentTail(path), [], 0
    while tail.read(lambda line: found.append(line.data), most_bytes=100):
        calls += 1
    assert found == [b"%08d\n" % number for number in range(100)] and calls > 5


def test_a_file_that_cannot_be_read_is_a_warning(path: Path) -> None:
    path.mkdir()
    reader = Reader(path)
    assert reader.read() == []
    assert reader.tail.faults.warnings == [f"Cannot read {path}: Is a directory."]
