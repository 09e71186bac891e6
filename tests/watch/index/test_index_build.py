"""`build_indexes` and `export_parquet`, and the commands that call them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from pathlib import Path

import pytest

from tests.watch.index.runs import SECOND, answers, episode, follow, trained, write_steps, writer
from verl_server.cli import trajectories
from verl_server.errors import BadRequestError
from verl_server.files.run_output import claim_folder
from verl_server.rollout.trajectory import append_jsonl
from verl_server.watch.index import run_database
from verl_server.watch.index.index_build import build_indexes
from verl_server.watch.index.parquet_export import COLUMNS, export_parquet
from verl_server.watch.index.rows import EpisodeFilter
from verl_server.watch.index.run_index import RunIndex
from verl_server.watch.trajectory_file import TrajectoryFile


def said(path: Path) -> list[object]:
    index = follow(RunIndex(path))
    try:
        return answers(index)
    finally:
        index.close()


def expect_spared(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the answers about a run, whose lines must not be decoded for them."""

    def fail(file: str, line: bytes | None) -> tuple[object, ...]:
        raise AssertionError(f"a line of {file} was decoded")

    with monkeypatch.context() as patch:
        patch.setattr(run_database, "row_of_line", fail)
        return said(path)


def test_the_index_of_a_folder_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        files = writer(tmp_path, rank=rank)
        write_steps(files, 0, 3)
        files.record_untrained(3, [episode(0)])
        files.close()
    with (tmp_path / "trajectories-rank0.jsonl").open("ab") as file:
        file.write(b'{"damaged\n{"cut')
    wanted = said(tmp_path)
    for file in tmp_path.glob("*.sqlite*"):
        file.unlink()
    assert said(tmp_path) == wanted
    seen: list[tuple[int, int]] = []
    built = build_indexes(tmp_path, lambda done, total: seen.append((done, total)))
    assert [(each.path.name, each.rows) for each in built] == [("index-rank0.sqlite", 26), ("index-rank1.sqlite", 25)]
    assert seen[-1][0] == seen[-1][1] - len(b'{"cut') and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert expect_spared(tmp_path, monkeypatch) == wanted
    assert trajectories.main(["index", str(tmp_path)]) == 0
    assert "complete already" in capsys.readouterr().out
    files = writer(tmp_path, SECOND, resumed_at=3)  # a run that goes on adds to it
    write_steps(files, 3, 4)
    files.close()
    with sqlite3.connect(tmp_path / "index-rank0.sqlite") as database:
        assert database.execute("SELECT count(*) FROM lines").fetchone() == (18,)
    assert expect_spared(tmp_path, monkeypatch) == said(tmp_path)


def test_a_torn_index_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.jsonl"
    append_jsonl(file, [episode(n) for n in range(3)])
    wanted = said(file)
    index = tmp_path / "out.jsonl.index.sqlite"
    index.write_bytes(b"torn" * 999)
    assert [each.rows for each in build_indexes(file, lambda done, total: None)] == [3]
    assert expect_spared(file, monkeypatch) == wanted
    append_jsonl(file, [episode(3)])
    assert [each.rows for each in build_indexes(file, lambda done, total: None)] == [4]
    assert [each.rows for each in build_indexes(file, lambda done, total: None)] == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.index.sqlite"]


def test_what_cannot_be_indexed(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no trajectories"):
        build_indexes(tmp_path, lambda done, total: None)
    files = writer(tmp_path)
    write_steps(files, 0, 1)
    files.close()
    claim = claim_folder(tmp_path)
    try:
        with pytest.raises(BadRequestError, match="Another process"):
            build_indexes(tmp_path, lambda done, total: None)
    finally:
        claim.release()


def test_a_rollout_writes_the_index_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed rollout rewrites its file, and the index with it."""
    file = tmp_path / "t.jsonl"
    with contextlib.closing(TrajectoryFile(file, {"command": "rollout"}, {})) as output:
        output.begin("m")
        for number in range(3):
            output.add(episode(number, 0, None if number == 1 else 1.0))
    assert len(expect_spared(file, monkeypatch)[2]) == 3  # type: ignore[arg-type]
    with contextlib.closing(TrajectoryFile(file, {"command": "rollout"}, {}, resume=True)) as output:
        output.begin("m")
        output.add(episode(1, 0, 0.5))
    assert expect_spared(file, monkeypatch) == said(file)
    index = follow(RunIndex(file))
    rewards = sorted(row.reward or 0.0 for row in index.episodes(EpisodeFilter()).rows)
    index.close()
    assert len(rewards) == len(file.read_bytes().splitlines())


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run, out = tmp_path / "run", tmp_path / "out.parquet"
    files = writer(run)
    write_steps(files, 0, 3)
    files.close()
    files = writer(run, SECOND, resumed_at=2)
    agent = [episode(0, 0, 1.0, session="s", branch=branch, length=branch + 1) for branch in range(2)]
    files.record_trajectories(2, [*agent, episode(0, 1, None, length=0, seed=2**70)])
    files.record_trained([trained(2, 0, 1)])
    files.close()
    monkeypatch.setattr("verl_server.watch.index.parquet_export._GROUP_BYTES", 2000)
    assert trajectories.main(["export", str(run), "--parquet", str(out)]) == 0
    assert "11 trajectories" in capsys.readouterr().out
    table = parquet.read_table(out)
    assert table.column_names == list(COLUMNS) and parquet.ParquetFile(out).num_row_groups > 2
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 3  # without the lost step
    assert rows[1]["reward"] == 1.0 and rows[1]["tokens"] == [1, 2, 3, 3, 3] and rows[1]["loss_mask"] == [0, 0, 1, 1, 1]
    assert rows[1]["trained_positions"] == [2] and rows[1]["gap_mean"] == 0.125 and rows[1]["tools"] == ["look"]
    assert json.loads(rows[1]["turns"])[0]["observation"] == {"text": "What is it?"}
    assert [row["branch"] for row in rows[8:]] == [0, 1, 0] and rows[8]["advantage"] is None
    assert rows[10]["reward"] is None and rows[10]["seed"] == str(2**70) and rows[10]["error"] == "the server is full"
    assert trajectories.main(["export", str(run), "--parquet", str(out), "--step", "1"]) == 0
    assert parquet.read_table(out).num_rows == 4
    with pytest.raises(BadRequestError, match="steps 0 to 2"):
        trajectories.main(["export", str(run), "--parquet", str(out), "--step", "9"])
    with pytest.raises(BadRequestError, match="cannot be written"):
        trajectories.main(["export", str(run), "--parquet", str(tmp_path / "absent" / "out.parquet")])
    assert not list(tmp_path.glob(".*"))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    index = RunIndex(tmp_path)
    try:
        with pytest.raises(BadRequestError, match=r"verl-server\[parquet\]"):
            export_parquet(index, tmp_path / "out.parquet")
    finally:
        index.close()
