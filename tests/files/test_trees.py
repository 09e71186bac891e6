"""Folders that a policy filled: links, FIFOs, sockets, giant and deep ones, and such without permissions."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_server.files.trees import TreeBounds, TreeError, copy_tree, read_below, remove_tree, write_below

_NOBODY = 65534


@pytest.fixture
def tree() -> Iterator[Path]:
    """Yield a short path: the address of a socket has at most 107 bytes."""
    root = Path(tempfile.mkdtemp(prefix="trees-"))
    (root / "tree").mkdir()
    yield root / "tree"
    remove_tree(root)


@pytest.fixture
def without_rights(tree: Path) -> Iterator[None]:
    """Run the test as a user without rights: root ignores permissions."""
    if os.geteuid() != 0:
        yield
        return
    for path in (tree.parent, tree):
        os.chown(path, _NOBODY, _NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _nested(folder: Path, depth: int, name: str) -> None:
    """Make folders inside each other: a path to them would be too long."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inner)
        outer, inner = inner, os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)


def test_copy_keeps_content_permissions_and_times(tree: Path) -> None:
    (tree / "src").mkdir()
    (tree / "src" / "run.sh").write_text("echo 1\n")
    os.chmod(tree / "src" / "run.sh", 0o4755)
    os.utime(tree / "src" / "run.sh", ns=(1_000_000_007, 2_000_000_009))
    (tree / "src" / "empty").mkdir()
    odd = os.fsencode(tree / "src") + b"/\xff\n name"
    os.close(os.open(odd, os.O_CREAT))
    copy = tree.parent / "copy"
    assert copy_tree(tree, copy) == []
    script = copy / "src" / "run.sh"
    assert script.read_text() == "echo 1\n" and script.stat().st_mode & 0o7777 == 0o755
    assert script.stat().st_mtime_ns == 2_000_000_009
    assert sorted(os.listdir(os.fsencode(copy / "src"))) == [b"empty", b"run.sh", b"\xff\n name"]


def test_copy_follows_no_link_and_opens_no_special_file(tree: Path) -> None:
    secret = tree.parent / "secret"
    secret.write_text("key")
    os.symlink(secret, tree / "file")
    os.symlink("/", tree / "root")
    os.symlink("missing", tree / "dangling")
    os.symlink("loop", tree / "loop")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tree / "socket"))
    copy = tree.parent / "copy"
    assert sorted(copy_tree(tree, copy)) == ["fifo", "socket"]
    assert sorted(os.listdir(copy)) == ["dangling", "file", "loop", "root"]
    assert all((copy / name).is_symlink() for name in os.listdir(copy))


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        (lambda tree: [(tree / str(i)).touch() for i in range(6)], "more than 5 files"),
        (lambda tree: (tree / "big").write_bytes(b"x" * 1001), "more than 1,000 bytes"),
        (lambda tree: os.truncate(os.open(tree / "hole", os.O_CREAT | os.O_RDWR), 2**40), "more than 1,000 bytes"),
        (lambda tree: _nested(tree, 4, "deep"), "more than 3 folders inside each other"),
        (lambda tree: (tree.rmdir(), os.symlink("/etc", tree)), "cannot be read"),
        (lambda tree: tree.rmdir(), "There is no folder"),
    ],
)
def test_copy_refuses_what_exceeds_a_bound(tree: Path, fill: Callable[[Path], object], says: str) -> None:
    fill(tree)
    with pytest.raises(TreeError, match=says):
        copy_tree(tree, tree.parent / "copy", TreeBounds(entries=5, bytes=1000, depth=3))


@pytest.mark.usefixtures("without_rights")
def test_folders_and_files_without_permissions(tree: Path) -> None:
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner" / "file").write_text("x")
    for path in (tree / "closed" / "inner" / "file", tree / "closed" / "inner", tree / "closed", tree):
        os.chmod(path, 0)
    copy = tree.parent / "copy"
    copy_tree(tree, copy)
    write_below(copy, "closed/inner/file", b"y")
    assert (copy / "closed" / "inner" / "file").read_text() == "y"
    os.chmod(tree / "closed", 0)
    remove_tree(tree)
    assert not tree.exists()


@pytest.mark.parametrize("kind", ["file", "link", "link to a folder", "fifo", "folder", "nothing"])
@pytest.mark.parametrize("place", ["a/b", "a"])
def test_write_replaces_what_is_in_its_place(tree: Path, place: str, kind: str) -> None:
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "b").write_text("safe")
    at = tree / place
    at.parent.mkdir(exist_ok=True)
    match kind:
        case "file":
            at.write_text("policy")
        case "link":
            os.symlink(outside / "b", at)
        case "link to a folder":
            os.symlink(outside, at)
        case "fifo":
            os.mkfifo(at)
        case "folder":
            (at / "c").mkdir(parents=True)
            os.symlink(outside, at / "c" / "link")
    write_below(tree, "a/b", b"check", 0o755)
    assert (tree / "a" / "b").read_bytes() == b"check" and (tree / "a" / "b").stat().st_mode & 0o777 == 0o755
    assert not (tree / "a").is_symlink() and not (tree / "a" / "b").is_symlink()
    assert (outside / "b").read_text() == "safe"


def test_read_takes_small_files_only(tree: Path) -> None:
    (tree / "in").mkdir()
    (tree / "in" / "file").write_text("0.5")
    os.symlink(tree / "in" / "file", tree / "link")
    os.symlink(tree / "in", tree / "folder")
    os.mkfifo(tree / "fifo")
    assert read_below(tree, "in/file", 3) == b"0.5"
    for path in ("link", "folder/file", "fifo", "in", "missing", "in/file/x"):
        assert read_below(tree, path, 3) is None
    assert read_below(tree, "in/file", 2) is None
    for path in ("../file", "in/../../file", str(tree / "in/file")):
        with pytest.raises(ValueError, match="no path below"):
            read_below(tree, path, 3)


def test_remove_follows_no_link_and_needs_no_recursion(tree: Path) -> None:
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("safe")
    os.symlink(outside, tree / "link")
    os.mkfifo(tree / "fifo")
    _nested(tree, 3000, "d" * 200)
    remove_tree(tree)
    assert not tree.exists() and (outside / "file").read_text() == "safe"


def test_remove_of_a_link_a_file_and_nothing(tree: Path) -> None:
    (tree / "file").write_text("x")
    os.symlink(tree / "file", tree / "link")
    remove_tree(tree / "link")
    assert os.listdir(tree) == ["file"]
    remove_tree(tree / "file")
    remove_tree(tree / "missing")
    assert os.listdir(tree) == []


def test_no_descriptor_is_left_open(tree: Path) -> None:
    os.symlink("/", tree / "link")
    _nested(tree, 80, "d")
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(TreeError):
        copy_tree(tree, tree.parent / "copy")
    write_below(tree, "link/x/y", b"")
    read_below(tree, "link/x/y", 9)
    remove_tree(tree)
    assert len(os.listdir("/proc/self/fd")) == before
