"""Faults of followed files: skipped places are counted, texts are kept once, in a bounded number and length."""

from __future__ import annotations

from pathlib import Path

from verl_server.files.following import Faults, size_of


def test_a_skipped_place_is_counted_and_an_unreadable_file_is_not(tmp_path: Path) -> None:
    faults = Faults()
    faults.skip(f"{tmp_path}, byte 4: bad")
    faults.skip(f"{tmp_path}, byte 4: bad")
    faults.unreadable(tmp_path, IsADirectoryError(21, "Is a directory"))
    assert faults.damaged == 2
    assert faults.warnings == [f"{tmp_path}, byte 4: bad", f"Cannot read {tmp_path}: Is a directory."]


def test_many_and_long_faults_take_little_memory() -> None:
    faults = Faults()
    for number in range(1000):
        faults.skip(f"{number} " + 10_000 * "x")
    assert faults.damaged == 1000
    assert len(faults.warnings) == 20 and all(len(text) == 500 for text in faults.warnings)


def test_a_file_that_is_gone_has_no_bytes(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    assert size_of(file) == 0
    file.write_bytes(b"one\n")
    assert size_of(file) == 4
