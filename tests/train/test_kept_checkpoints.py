"""The newest checkpoints of a run stay, and the one of the best evaluated weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.train.test_evaluations import evaluated
from verl_server.train.checkpoints import Progress, check_checkpoint, latest_checkpoint, write_progress
from verl_server.train.kept_checkpoints import remove_old_checkpoints


def with_checkpoints(out: Path, *steps: int) -> Path:
    for step in steps:
        folder = out / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "shard").write_text(f"the weights of step {step}")
        write_progress(folder, Progress(step, step))
    return out


def steps(out: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("checkpoint-")) for folder in out.glob("checkpoint-*"))


@pytest.mark.parametrize(("keep", "stays"), [(1, [100]), (2, [10, 100]), (3, [9, 10, 100]), (9, [8, 9, 10, 100])])
def test_the_newest_stay(tmp_path: Path, keep: int, stays: list[int]) -> None:
    remove_old_checkpoints(with_checkpoints(tmp_path, 8, 9, 10, 100), keep)
    assert steps(tmp_path) == stays
    assert all(check_checkpoint(tmp_path / f"checkpoint-{step}").next_step == step for step in stays)


def test_the_best_one_stays_until_another_is_better(tmp_path: Path) -> None:
    evaluated(tmp_path, 9, 0.5)
    remove_old_checkpoints(with_checkpoints(tmp_path, 8, 9, 10, 11), 1)
    assert steps(tmp_path) == [9, 11]
    evaluated(tmp_path, 11, 0.75)
    evaluated(tmp_path, 7, 1.0)  # its checkpoint does not exist, so it is not the best of those that do
    remove_old_checkpoints(with_checkpoints(tmp_path, 12), 1)
    assert steps(tmp_path) == [11, 12]


def test_if_the_best_one_is_not_known_all_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "evaluations.jsonl").write_text("[]\n")
    remove_old_checkpoints(with_checkpoints(tmp_path, 1, 2, 3), 1)
    assert steps(tmp_path) == [1, 2, 3]
    assert "are not removed" in caplog.text and "evaluations.jsonl:1" in caplog.text


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename, remove = os.fsync, os.replace, shutil.rmtree

    def note_fsync(fd: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def note_rename(old: Path, new: Path) -> None:
        calls.append(f"rename {old.name}")
        rename(old, new)

    def interrupted(folder: Path, **_: bool) -> None:
        calls.append(f"remove {folder.name}")
        (folder / "shard").unlink()

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_rename)
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    remove_old_checkpoints(with_checkpoints(tmp_path, 1, 2), 1)
    assert calls == ["rename checkpoint-1", f"fsync {tmp_path.name}", "remove .checkpoint-1.removed"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2" and steps(tmp_path) == [2]
    monkeypatch.setattr(shutil, "rmtree", remove)
    remove_old_checkpoints(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint-2"]


def test_what_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    remove_old_checkpoints(with_checkpoints(tmp_path, 1, 2), 1)
    assert steps(tmp_path) == [1, 2] and "not permitted" in caplog.text
