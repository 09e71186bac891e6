"""The private folders of a process, and those that others left or remove at the same time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from verl_server.rollout import scratch


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_root_that_another_process_removes_at_once_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process looks for roots of dead processes between the making of this root and its lock."""
    make, made = tempfile.mkdtemp, []

    def removed_once(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_once)
    root = scratch.private_root.__wrapped__()
    assert [str(root)] == made[1:] and root.is_dir()


def test_roots_of_dead_processes_go_and_those_of_living_ones_stay(place: Path) -> None:
    code = "import os; from verl_server.rollout.scratch import private_folder as new; print(new('x'), flush=True); "
    env = os.environ | {"TMPDIR": str(place)}
    dead = subprocess.run([sys.executable, "-c", f"{code}os._exit(0)"], env=env, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}input()"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as living:
        assert living.stdout is not None
        folder = Path(living.stdout.readline().strip())  # this process has removed the folder of the dead one
        assert folder.is_dir() and not Path(dead.stdout.strip()).exists()
        scratch.private_root.__wrapped__()
        assert folder.is_dir()
        living.communicate("\n", timeout=60)
    assert not folder.exists()


def test_what_stays_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(scratch, "remove_tree", refused)
    with caplog.at_level(logging.WARNING):
        scratch.remove_folder(tmp_path)
    assert f"{tmp_path} was not removed" in caplog.text
