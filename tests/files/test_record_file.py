"""Records are durable one by one. A cut or damaged end is left out; damage before an intact record is an error."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from verl_server.errors import BadRequestError
from verl_server.files.record_file import RecordFile, read_records

PAYLOADS = [b"one", b"", b"\xc1rec" * 5, bytes(range(256)) * 300]


def written(path: Path) -> RecordFile:
    file = RecordFile(path)
    for payload in PAYLOADS:
        file.append(payload)
    return file


def payloads(path: Path) -> list[bytes]:
    return [payload for _, payload in read_records(path)]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.records"
    assert payloads(path) == []
    written(path).close()
    file = RecordFile(path)  # a second start appends
    place = file.append(b"later")
    assert payloads(path) == [*PAYLOADS, b"later"]
    assert path.read_bytes()[place.offset : place.end].endswith(b"later") and place.end == path.stat().st_size


def test_each_record_is_flushed_before_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or write(fd, data))  # type: ignore[func-returns-value]
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))  # type: ignore[func-returns-value]
    written(tmp_path / "a.records")
    assert calls == ["fsync", *["write", "fsync"] * len(PAYLOADS)]  # the first is of the folder


@pytest.mark.parametrize("damage", ["cut", "changed", "zeros"])
def test_a_damaged_end_is_left_out_at_every_byte(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.records"
    file = RecordFile(path)
    file.append(b"kept")
    last = file.append(b"lost " * 9)
    file.close()
    whole = path.read_bytes()
    for byte in range(last.offset + 1, last.end):
        if damage == "cut":
            path.write_bytes(whole[:byte])
        elif damage == "changed":
            path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 0x10]) + whole[byte + 1 :])
        else:
            path.write_bytes(whole[:byte] + bytes(300))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert payloads(path) == [b"kept"]
        assert f"{path}, at byte {last.offset}" in caplog.text
        again = RecordFile(path)
        again.append(b"next")
        again.close()
        assert payloads(path) == [b"kept", b"next"]


def test_damage_before_an_intact_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    written(path).close()
    whole = path.read_bytes()
    places = [place for place, _ in read_records(path)]
    for byte in range(places[1].offset, places[2].end):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 0x10]) + whole[byte + 1 :])
        with pytest.raises(BadRequestError, match=r"a\.records is damaged at byte \d+.* remove it to continue"):
            payloads(path)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_record_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.records"
    file = written(path)
    write = os.write
    with monkeypatch.context() as patch:

        def half(descriptor: int, data: bytes) -> int:
            if write(descriptor, bytes(data)[:7]) < 7:
                raise AssertionError
            raise OSError(errno.ENOSPC, "No space left on device")

        def no_sync(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, call, half if call == "write" else no_sync)
        with pytest.raises(OSError, match=r"No space|Input/output"):
            file.append(b"lost" * 9)
    assert payloads(path) == PAYLOADS
    file.append(b"next")
    assert payloads(path) == [*PAYLOADS, b"next"]


def test_records_that_are_not_kept_are_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.records"
    file = written(path)
    places = [place for place, _ in read_records(path)]
    with monkeypatch.context() as patch:

        def no_rename(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "replace", no_rename)
        with pytest.raises(OSError, match="Input/output"):
            file.keep(places[2:])
    assert payloads(path) == PAYLOADS and [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert file.append(b"fifth").offset == places[-1].end
    kept = file.keep([places[0], places[3]])
    assert payloads(path) == [PAYLOADS[0], PAYLOADS[3]] and kept == [place for place, _ in read_records(path)]
    file.append(b"next")
    assert payloads(path) == [PAYLOADS[0], PAYLOADS[3], b"next"]
    file.keep([])
    assert path.stat().st_size == 0
