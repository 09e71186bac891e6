"""`IndexFile`: what a writer leaves after kills, faults and replaced files, and that it harms no run."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.watch.index.runs import SECOND, answers, follow, write_steps, writer
from verl_server.files.segments import Segments
from verl_server.watch.index import index_file, line_rows, run_database
from verl_server.watch.index.index_file import IndexFile
from verl_server.watch.index.network_files import is_on_network
from verl_server.watch.index.row_kinds import index_of_rank
from verl_server.watch.index.run_index import RunIndex

Open = Callable[[Path], RunIndex]


@pytest.fixture
def opened() -> Iterator[Open]:
    """A function that opens and fills an index, which the test's end closes."""
    found: list[RunIndex] = []

    def make(path: Path) -> RunIndex:
        found.append(RunIndex(path))
        return follow(found[-1])

    yield make
    for index in found:
        index.close()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of lines that a reader had to decode, because the index lacks them."""
    found: list[str] = []
    original = run_database.row_of_line

    def row_of_line(file: str, line: bytes | None) -> line_rows.Row:
        found.append(file)
        return original(file, line)

    monkeypatch.setattr(run_database, "row_of_line", row_of_line)
    return found


def expected(run: Path, opened: Open) -> list[object]:
    """Return the answers about a copy of the run that has no index."""
    copy = run.with_name(f"{run.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.sqlite*"))
    return answers(opened(copy))


def rows(folder: Path) -> int:
    with sqlite3.connect(index_of_rank(folder, 0)) as database:
        return int(database.execute("SELECT count(*) FROM lines").fetchone()[0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps, whose index has all rows."""
    folder = tmp_path / "run"
    files = writer(folder)
    write_steps(files, 0, 3)
    files.close()
    return folder


def test_a_whole_index_spares_the_reader_the_lines(run: Path, opened: Open, decoded: list[str]) -> None:
    answers(opened(run))
    assert decoded == []


def test_a_killed_writer_leaves_an_index_that_is_behind(tmp_path: Path, opened: Open, decoded: list[str]) -> None:
    """The next start reads the few lines again that have no rows, and its index is whole."""
    folder = tmp_path / "run"
    files = writer(folder)
    write_steps(files, 0, 3)  # rows wait for a batch, and the process is killed
    with (folder / "trajectories-rank0.jsonl").open("ab") as file:
        file.write(b'{"step":3,"ra')
    assert answers(opened(folder)) == expected(folder, opened)
    assert decoded
    files = writer(folder, SECOND, resumed_at=3)
    write_steps(files, 3, 4)
    files.close()
    decoded.clear()
    found = answers(opened(folder))
    assert decoded == []
    assert found == expected(folder, opened)


@pytest.mark.parametrize(
    "tear",
    [
        lambda file: file.write_bytes(b"no database, but long enough to look like one" * 100),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: file.write_bytes(file.read_bytes()[:4096] + b"\xff" * (file.stat().st_size - 4096)),
        lambda file: file.with_name(f"{file.name}-journal").write_bytes(b"of a transaction that was interrupted"),
        lambda file: sqlite3.connect(file).execute("PRAGMA user_version=99"),
        lambda file: sqlite3.connect(file, isolation_level=None).execute("DELETE FROM lines WHERE step = 1"),
        lambda file: sqlite3.connect(file, isolation_level=None).execute("UPDATE sources SET bytes = bytes + 1"),
        lambda file: sqlite3.connect(file, isolation_level=None).execute("DROP TABLE lines"),
    ],
    ids=["garbage", "empty", "cut", "overwritten", "journal", "version", "rows lost", "beyond the file", "no table"],
)
def test_a_torn_index_is_not_believed(run: Path, opened: Open, tear: Callable[[Path], object]) -> None:
    wanted = expected(run, opened)
    tear(index_of_rank(run, 0))
    assert answers(opened(run)) == wanted
    files = writer(run, SECOND, resumed_at=3)  # the next start makes it anew, or goes on
    write_steps(files, 3, 4)
    files.close()
    assert answers(opened(run)) == expected(run, opened)


def test_an_index_of_replaced_files_is_not_believed(run: Path, opened: Open) -> None:
    """Another run's files are in the folder now: shorter ones, and ones of the same size."""
    file = run / "trajectories-rank0.jsonl"
    text = file.read_bytes()
    for new in (text[: text.index(b"\n") + 1], text.replace(b'"reward":1.0', b'"reward":3.0')):
        file.write_bytes(new)
        assert answers(opened(run)) == expected(run, opened)


def test_rows_of_removed_segments_are_left_out(tmp_path: Path, opened: Open) -> None:
    folder = tmp_path / "run"
    files = writer(folder)
    files._trajectories = Segments(folder / "trajectories-rank0.jsonl", 6000)
    write_steps(files, 0, 6)
    files.close()
    (folder / "trajectories-rank0.jsonl").unlink()
    wanted = expected(folder, opened)
    assert answers(opened(folder)) == wanted
    files = writer(folder, SECOND, resumed_at=6)
    write_steps(files, 6, 7)
    files.close()
    with sqlite3.connect(index_of_rank(folder, 0)) as database:
        names = {name for (name,) in database.execute("SELECT file FROM sources")}
    assert names == {file.name for file in folder.glob("tra*.jsonl")}


def test_a_reader_never_harms_the_writer(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While somebody reads the database, rows wait; nothing is logged, and nothing is lost."""
    files = writer(run, SECOND, resumed_at=3)
    files._index.add([], list)
    with sqlite3.connect(index_of_rank(run, 0), isolation_level=None) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM lines").fetchone()
        write_steps(files, 3, 4)
        files._index._flush()
        reader.execute("COMMIT")
    assert rows(run) == 12
    write_steps(files, 4, 5)
    files.close()
    assert rows(run) == 20
    assert caplog.records == []


def test_rows_that_can_never_be_written_are_given_up(
    run: Path, opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "_MOST_PENDING", 4)
    monkeypatch.setattr(index_file, "_BATCH_ROWS", 1)
    files = writer(run, SECOND, resumed_at=3)
    with sqlite3.connect(index_of_rank(run, 0), isolation_level=None) as reader:
        reader.execute("BEGIN EXCLUSIVE")
        write_steps(files, 3, 9)
        reader.execute("COMMIT")
    files.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert answers(opened(run)) == expected(run, opened)


@pytest.mark.parametrize(
    "message", ["database or disk is full", "disk I/O error", "attempt to write a readonly database"]
)
def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    def full(self: IndexFile) -> None:
        raise sqlite3.OperationalError(message)

    folder = tmp_path / "run"
    files = writer(folder)
    with monkeypatch.context() as patch:
        patch.setattr(index_file, "_BATCH_ROWS", 1)
        patch.setattr(IndexFile, "_flush", full)
        write_steps(files, 0, 3)
        files.close()
    (record,) = caplog.records  # once
    assert message in record.getMessage() and "goes on" in record.getMessage()
    assert answers(opened(folder)) == expected(folder, opened)


def test_an_index_that_cannot_be_created_does_not_end_the_run(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    index_of_rank(folder, 0).mkdir(parents=True)
    files = writer(folder)
    write_steps(files, 0, 2)
    files.close()
    assert len(caplog.records) == 1
    assert len(opened(folder).steps()) == 2


def test_a_row_that_cannot_be_made_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> list[line_rows.Row]:
        raise RuntimeError("a fault of ours")

    index = IndexFile(index_of_rank(tmp_path, 0))
    places = Segments(tmp_path / "trajectories-rank0.jsonl").append([b"{}\n"])
    index.add(places, fails)
    index.close()
    assert "a fault of ours" in caplog.text


def test_a_failed_write_that_was_cut_off_leaves_a_right_index(tmp_path: Path, opened: Open) -> None:
    """After an error, the segment was cut, and the next line begins before the end of the rows."""
    folder = tmp_path / "run"
    files = writer(folder)
    write_steps(files, 0, 2)
    files.close()
    file = folder / "trajectories-rank0.jsonl"
    os.truncate(file, file.read_bytes()[:-10].rindex(b"\n") + 1)
    files = writer(folder, SECOND, resumed_at=1)
    write_steps(files, 1, 2)
    files.close()
    assert answers(opened(folder)) == expected(folder, opened)


def test_two_writers_of_one_folder_harm_nobody(tmp_path: Path, opened: Open) -> None:
    """Two processes that write a run at once are refused elsewhere; their index is right or is not believed."""
    folder = tmp_path / "run"
    one, other = writer(folder), writer(folder, SECOND, resumed_at=0)
    for step in range(4):
        write_steps(one, step, step + 1)
        write_steps(other, step, step + 1)
    one.close()
    other.close()
    assert answers(opened(folder)) == expected(folder, opened)


def test_a_read_only_folder_is_read(run: Path, opened: Open, decoded: list[str]) -> None:
    wanted = answers(opened(run))
    before = {file.name: file.stat().st_mtime_ns for file in run.iterdir()}
    run.chmod(0o555)
    try:
        assert answers(opened(run)) == wanted and decoded == []
    finally:
        run.chmod(0o755)
    assert {file.name: file.stat().st_mtime_ns for file in run.iterdir()} == before


def test_network_file_systems(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    for kind, wanted in (("ext4", False), ("nfs4", True), ("fuse.sshfs", True), ("fuseblk", False), ("cifs", True)):
        mounts.write_text(
            f"1 0 0:99 / /x rw - nfs4 a rw\n36 35 {place} / /mnt rw,noatime master:1 - {kind} server:/x rw\n"
        )
        assert is_on_network(tmp_path, mounts) is wanted
    assert not is_on_network(tmp_path, tmp_path / "absent")


def test_no_index_is_written_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "is_on_network", lambda folder: True)
    files = writer(tmp_path)
    write_steps(files, 0, 1)
    files.close()
    assert not list(tmp_path.glob("*.sqlite*"))


def test_databases_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = [tmp_path / f"verl-server-watch-{child.pid}-abc.sqlite{end}" for end in ("", "-wal", "-shm")]
    others = [tmp_path / f"verl-server-watch-{os.getpid()}-abc.sqlite", tmp_path / "verl-server-watch-x.sqlite"]
    for file in left + others:
        file.touch()
    index = RunIndex(tmp_path / "run")
    assert [file.exists() for file in left + others] == [False] * 3 + [True] * 2
    index.close()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_the_page_needs_imports_nothing_large() -> None:
    """The page's process must stay small on a run of 10 GB."""
    code = (
        "import sys, verl_server.watch.index.run_index; "
        "print([name for name in ('torch', 'transformers', 'pydantic', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
