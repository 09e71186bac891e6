"""Files that a program has left, with everything that a hostile one could put in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl_server.rollout.left_files import read_left, remove_left


def test_only_regular_files_below_the_folder_are_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    home = tmp_path / "home"
    (home / "a").mkdir(parents=True)
    (home / "a/answer").write_text("answer")
    (home / "link").symlink_to(secret)
    (home / "folder").symlink_to(tmp_path)
    os.mkfifo(home / "pipe")
    assert read_left(home, "a/answer", 100) == b"answer" and read_left(home, "a/answer", 3) == b"ans"
    for name in ("link", "folder/secret", "pipe", "a", "none", "a/answer/x"):
        assert read_left(home, name, 100) is None, name
    for name in ("../secret", "", str(secret), "a/../../secret"):
        with pytest.raises(ValueError, match="no path below"):
            read_left(home, name, 100)


def test_anything_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    """A tree of 3,000 folders, odd names, a pipe, links to other folders, and folders without permissions."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    root = tmp_path / "root"
    (root / "locked/inner").mkdir(parents=True)
    (root / "locked/inner/file").write_text("x")
    (root / "link").symlink_to(kept)
    os.mkfifo(root / "pipe")
    (root / "left-0").mkdir()
    os.mkdir(os.fsencode(root) + b"/\xff\n")
    os.chmod(root / "locked/inner", 0o000)
    os.chmod(root / "locked", 0o000)
    here = os.getcwd()
    os.chdir(root)
    try:
        for _ in range(3000):
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(here)
    remove_left(root)
    assert not root.exists() and (kept / "file").read_text() == "x"
    remove_left(root)  # nothing is there
