"""Lines are appended, rotated by size and read in order. A cut line, a full disk and a bound lose only what is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from verl_server.files.segments import SegmentFollower, Segments, read_segments, remove_oldest, segment_files


def lines_of(path: Path) -> list[bytes]:
    return [line for _, line in read_segments(path)]


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%08d\n" % number for number in range(first, last)]


def test_places_are_those_of_the_lines(tmp_path: Path) -> None:
    path, written = tmp_path / "a.jsonl", numbered(0, 7)
    log = Segments(path, segment_bytes=30)
    places = log.append(written[:3]) + log.append(written[3:])
    log.close()
    places += Segments(path, segment_bytes=30).append(numbered(7, 9))
    found = [(tmp_path / file).read_bytes()[offset : offset + length] for file, offset, length in places]
    assert found == written + numbered(7, 9)
    assert len({place.file for place in places}) > 1


def test_segments_are_numbered_and_go_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for first in range(0, 40, 4):  # each start appends to the newest segment
        log = Segments(path, segment_bytes=30)
        log.append(numbered(first, first + 4))
        log.close()
    names = [file.name for file in segment_files(path)]
    assert names == ["a.jsonl", *(f"a.{number}.jsonl" for number in range(1, 14))], "10 comes after 9"
    assert lines_of(path) == numbered(0, 40)
    assert all(file.stat().st_size <= 30 for file in segment_files(path))


def test_a_line_beyond_the_size_of_a_segment_has_one_for_itself(tmp_path: Path) -> None:
    log = Segments(tmp_path / "a.jsonl", segment_bytes=10)
    written = [b"short\n", b"x" * 99 + b"\n", b"y" * 99 + b"\n", b"end\n"]
    log.append(written)
    assert [file.read_bytes() for file in segment_files(log.path)] == written


def test_other_files_are_no_segments(tmp_path: Path) -> None:
    for middle in ("", ".2", ".02", ".x", "b", "-rank1", ".", ".\u00b2"):
        (tmp_path / f"a{middle}.jsonl").touch()
    assert [file.name for file in segment_files(tmp_path / "a.jsonl")] == ["a.jsonl", "a.2.jsonl"]
    assert segment_files(tmp_path / "absent/a.jsonl") == []


def test_a_cut_last_line_is_dropped_by_readers_and_by_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Segments(path).append(numbered(0, 2))
    with path.open("ab") as file:
        file.write(b"c" * 200_000)  # longer than what is read at once
    assert lines_of(path) == numbered(0, 2)
    Segments(path).append(numbered(2, 3))
    assert path.read_bytes() == b"".join(numbered(0, 3))
    path.write_bytes(b"only a cut line")
    Segments(path).append(numbered(0, 1))
    assert path.read_bytes() == numbered(0, 1)[0]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, room = Segments(tmp_path / "a.jsonl", segment_bytes=1000), [22]
    write = os.write

    def until_full(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", until_full)
    with pytest.raises(OSError, match="No space left"):
        log.append(numbered(0, 5))
    assert log.path.read_bytes() == b"".join(numbered(0, 2)), "two whole lines of 9 bytes, without the cut third one"
    room[0] = 10**6
    log.append(numbered(5, 7))
    assert lines_of(log.path) == numbered(0, 2) + numbered(5, 7)


def test_the_oldest_segments_of_all_paths_are_removed_first(tmp_path: Path) -> None:
    logs = [Segments(tmp_path / f"{name}.jsonl", segment_bytes=20) for name in "ab"]
    for log in logs:
        log.append(numbered(0, 8))
    files = [file for pair in zip(*(segment_files(log.path) for log in logs), strict=True) for file in pair]
    for age, file in enumerate(files):
        os.utime(file, ns=(age, age))
    removed = remove_oldest([log.path for log in logs], 100)
    assert removed == [(file, 18) for file in files[:3]], "5 of 8 segments of 18 bytes stay"
    assert lines_of(logs[0].path) == numbered(4, 8) and lines_of(logs[1].path) == numbered(2, 8)
    assert len(remove_oldest([log.path for log in logs], 0)) == 3, "the newest of each stay"
    for log in logs:
        log.append(numbered(8, 9))
        assert lines_of(log.path) == numbered(6, 9)
        assert segment_files(log.path)[-1].name.endswith(".4.jsonl"), "a number is never used twice"


def test_a_segment_that_is_removed_when_it_is_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "a.jsonl", Path.open
    Segments(path, segment_bytes=20).append(numbered(0, 6))

    def late(file: Path, *arguments: str) -> object:
        if file == path:
            file.unlink()
        return opened(file, *arguments)

    monkeypatch.setattr(Path, "open", late)
    assert lines_of(path) == numbered(2, 6)


def test_a_disk_that_refuses_to_cut_a_torn_line_spoils_no_further_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Segments(tmp_path / "a.jsonl")
    log.append(numbered(0, 1))
    write = os.write

    def torn(descriptor: int, data: memoryview) -> int:
        if len(data) <= 4:
            raise OSError(errno.EIO, "Input/output error")
        return write(descriptor, data[:5])

    def refuse(*_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", torn)
        broken.setattr(os, "ftruncate", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="output"):
                log.append(numbered(1, 2))
    assert lines_of(log.path) == numbered(0, 1)
    log.append(numbered(2, 3))
    assert log.path.read_bytes() == b"".join(numbered(0, 1) + numbered(2, 3))


def test_a_follower_yields_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = SegmentFollower(path)
    assert list(follower.read()) == [], "no file yet"
    path.write_bytes(b"a\nb\nhal")
    assert list(follower.read()) == [(f"{path}:1", b"a\n"), (f"{path}:2", b"b\n")]
    assert list(follower.read()) == []
    path.write_bytes(b"a\nb\nhalf\n")
    second = tmp_path / "events.1.jsonl"
    second.write_bytes(b"c\n")
    assert list(follower.read()) == [(f"{path}:3", b"half\n"), (f"{second}:1", b"c\n")]
    path.unlink()  # the writer of a bounded file
    with second.open("ab") as file:
        file.write(b"d\n")
    assert list(follower.read()) == [(f"{second}:2", b"d\n")]
