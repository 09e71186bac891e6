"""The disk that forgets keeps what was flushed, loses the rest in each way that a file system may, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.power_loss import Recording, recorded
from verl_server.files.durable import flush


def after(recording: Recording, mark: str, there: Path, look: Callable[[Path], str]) -> set[str]:
    """Return what `look` finds on the disks of a loss after `mark`."""
    found = set()
    for disk in recording.disks(samples=20):
        if mark in disk.marks:
            disk.write_to(there)
            found.add(look(there))
    return found


def read(file: str) -> Callable[[Path], str]:
    return lambda folder: repr((folder / file).read_bytes()) if (folder / file).exists() else "no file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_a_file_that_was_not_flushed_may_be_lost_empty_zeros_cut_or_whole(folder: Path, tmp_path: Path) -> None:
    with recorded(folder) as recording:
        (folder / "a").write_bytes(b"abcd")
        recording.mark("written")
    found = after(recording, "written", tmp_path / "then", read("a"))
    assert found == {"no file", "b''", r"b'\x00\x00\x00\x00'", "b'ab'", "b'abcd'"}


def test_content_is_flushed_with_the_file_and_the_name_with_the_folder(folder: Path, tmp_path: Path) -> None:
    with recorded(folder) as recording:
        (folder / "a").write_bytes(b"abcd")
        flush(folder / "a")
        recording.mark("content")
        flush(folder)
        recording.mark("both")
    assert after(recording, "content", tmp_path / "then", read("a")) == {"no file", "b'abcd'"}
    assert after(recording, "both", tmp_path / "then", read("a")) == {"b'abcd'"}


def test_lines_that_were_appended_are_lost_from_the_last_flush_on(folder: Path, tmp_path: Path) -> None:
    (folder / "log").write_bytes(b"old\n")
    with recorded(folder) as recording, (folder / "log").open("ab", buffering=0) as log:
        log.write(b"one\n")
        os.fsync(log.fileno())
        recording.mark("one")
        log.write(b"two\n")
        recording.mark("two")
    found = after(recording, "one", tmp_path / "then", read("log"))
    assert found == {r"b'old\none\n'", r"b'old\none\n\x00\x00\x00\x00'", r"b'old\none\ntw'", r"b'old\none\ntwo\n'"}


def test_a_rename_happens_wholly_or_not_and_in_order(folder: Path, tmp_path: Path) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "a").write_bytes(b"a")
    with recorded(folder) as recording:
        os.replace(folder / "old", folder / "new")
        (folder / "later").mkdir()
        recording.mark("renamed")
    found = after(recording, "renamed", tmp_path / "then", lambda there: " ".join(sorted(os.listdir(there))))
    assert found == {"old", "new", "later new"}


def test_two_folders_are_independent(folder: Path, tmp_path: Path) -> None:
    """The files of a folder may be gone while it has its old name still."""
    (folder / "old").mkdir()
    (folder / "old" / "a").write_bytes(b"a")
    with recorded(folder) as recording:
        os.replace(folder / "old", folder / "new")
        shutil.rmtree(folder / "new")
        recording.mark("removed")
    found = after(recording, "removed", tmp_path / "then", read("old/a")) | after(
        recording, "removed", tmp_path / "then", lambda there: str(sorted(os.listdir(there)))
    )
    assert {"no file", "['old']", "['new']", "[]"} <= found


def test_every_point_of_time_has_its_disks(folder: Path, tmp_path: Path) -> None:
    with recorded(folder) as recording:
        for name in "abc":
            (folder / name).touch()
            flush(folder)
    disks = {str(sorted(os.listdir(there))) for there in _written(recording, tmp_path / "then")}
    assert disks == {"[]", "['a']", "['a', 'b']", "['a', 'b', 'c']"}


def _written(recording: Recording, there: Path) -> list[Path]:
    places = []
    for number, disk in enumerate(recording.disks()):
        disk.write_to(there / str(number))
        places.append(there / str(number))
    return places


def test_a_rename_to_another_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "a").touch()
    with recorded(folder), pytest.raises(NotImplementedError, match="another folder"):
        os.replace(folder / "a", tmp_path / "a")
