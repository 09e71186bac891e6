"""Folders that another party filled, such as the workspace of a policy: copied, read, written into and removed.

Nothing here follows a symbolic link below the folder, waits for a FIFO or a device, recurses as deep as the tree is,
or reads more than the bounds permit. A folder or a file without permissions gets them first, because its owner, who
runs this code, may set them. `rollout/agents/program`, `rollout/environments/workspace` and `rollout/scratch` call
these functions when the policy's processes have ended. They stay safe if one still runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_server.errors import VerlServerError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: the open of a FIFO does not wait
_HANDLE = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC  # Linux: an open without permissions
_CHUNK = 2**20
_REMOVE_SECONDS = 60.0
_OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
"""Errors of an open that the content of a tree does not cause."""


class TreeError(VerlServerError):
    """A folder is not what it should be: it exceeds a bound, or another thing is in its place."""


@dataclass(frozen=True)
class TreeBounds:
    """The largest tree that `copy_tree` copies."""

    entries: int = 100_000
    """Files, folders and links."""
    bytes: int = 2**30
    """Bytes of all files. A hole of a sparse file counts."""
    depth: int = 64
    """Folders inside each other."""


def copy_tree(source: Path, target: Path, bounds: TreeBounds | None = None) -> list[str]:
    """Copy a folder to the new folder `target`. Return the paths of what was left out: FIFOs, sockets and devices.

    Links are copied as links. Files keep their times and their permissions, without set-uid bits, and the owner may
    read and write all of the copy. What vanishes during the copy is left out. Raise TreeError if the tree exceeds a
    bound or cannot be read, and OSError if `target` cannot be written.
    """
    copy = _Copy(bounds or TreeBounds())
    try:
        source_fd = _readable(_open_folder, str(source), None)
    except FileNotFoundError as error:
        raise TreeError(f"There is no folder {source}.") from error
    with _closing(source_fd):
        os.mkdir(target, 0o700)
        with _closing(os.open(target, _FOLDER)) as target_fd:
            copy.folder(source_fd, target_fd, "", 1)
    return copy.left_out


class _Copy:
    """One call of `copy_tree`."""

    def __init__(self, bounds: TreeBounds) -> None:
        self._bounds = bounds
        self._entries = self._bytes = 0
        self.left_out: list[str] = []

    def folder(self, source: int, target: int, where: str, depth: int) -> None:
        """Copy what is in the folder `source` into the folder `target`. Both are file descriptors."""
        if depth > self._bounds.depth:
            raise TreeError(f"{where!r:.200} has more than {self._bounds.depth} folders inside each other.")
        with os.scandir(source) as found:
            for entry in found:
                self._entries += 1
                if self._entries > self._bounds.entries:
                    raise TreeError(f"The folder has more than {self._bounds.entries:,} files, folders and links.")
                with contextlib.suppress(FileNotFoundError):
                    self._entry(source, target, entry.name, f"{where}{entry.name}", depth)

    def _entry(self, source: int, target: int, name: str, where: str, depth: int) -> None:
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISDIR(mode):
            with _closing(_readable(_open_folder, name, source)) as inner:
                os.mkdir(name, 0o700, dir_fd=target)
                with _closing(os.open(name, _FOLDER, dir_fd=target)) as new:
                    self.folder(inner, new, f"{where}/", depth + 1)
                    os.fchmod(new, mode & 0o777 | 0o700)
        elif stat.S_ISREG(mode):
            self._file(source, target, name)
        else:
            self.left_out.append(where)

    def _file(self, source: int, target: int, name: str) -> None:
        with _closing(_readable(_open_file, name, source)) as old:
            state = os.fstat(old)
            with _closing(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)) as new:
                self._content(old, new, state.st_size)
                os.fchmod(new, state.st_mode & 0o777 | 0o600)
                os.utime(new, ns=(state.st_atime_ns, state.st_mtime_ns))

    def _content(self, old: int, new: int, size: int) -> None:
        self._bytes += size
        if self._bytes > self._bounds.bytes:
            raise TreeError(f"The files of the folder have more than {self._bounds.bytes:,} bytes.")
        while size > 0:  # a file that grows meanwhile is cut off
            sent = os.sendfile(new, old, None, min(size, _CHUNK))
            if sent == 0:
                return
            size -= sent


def _readable(opened: Callable[[str, int | None], int], name: str, parent: int | None) -> int:
    """Return `opened(name, parent)`. Raise TreeError if what the tree contains keeps it from being read."""
    try:
        return opened(name, parent)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _OWN_ERRORS:
            raise
        raise TreeError(f"{name!r:.200} cannot be read: {error.strerror}.") from error


def read_below(root: Path, path: str, most: int) -> bytes | None:
    """Return the content of a file at a relative path below `root`, of at most `most` bytes.

    Return None if there is none: no file, a link there or in the place of a folder of the path, or a larger file.
    Raise ValueError if `path` is absolute or has "..".
    """
    *parents, name = path.split("/")
    if path.startswith("/") or ".." in (*parents, name):
        raise ValueError(f"{path!r} is no path below a folder")
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_closing(_open_folder(str(root), None)))
            for parent in parents:
                folder = stack.enter_context(_closing(_open_folder(parent, folder)))
            file = stack.enter_context(os.fdopen(_open_file(name, folder), "rb"))
            content = file.read(most + 1)
    except OSError as error:
        if error.errno in _OWN_ERRORS:
            raise
        return None
    return content if len(content) <= most else None


def write_below(root: Path, path: str, data: bytes, mode: int = 0o644) -> None:
    """Write a file at a relative path below `root`. What is in its place is removed: a link, a file, a folder.

    So is a link or a file in the place of a parent folder: nothing outside of `root` is written. `path` has no "."
    and no "..". Raise OSError if it cannot be written.
    """
    *parents, name = path.split("/")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_closing(_open_folder(str(root), None)))
        for parent in parents:
            folder = stack.enter_context(_closing(_made_folder(parent, folder)))
        _remove_entry(name, folder)
        new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(new, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)


def _made_folder(name: str, parent: int) -> int:
    """Open the folder `name` of the folder `parent`, which is made if there is none."""
    try:
        return _open_folder(name, parent)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
    os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def _remove_entry(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        remove_tree(Path(f"/proc/self/fd/{parent}/{name}"))


def remove_tree(path: Path) -> None:
    """Remove a folder with all that it contains, or the link or file in its place. Nothing there is no error.

    Each folder is emptied by moving its folders up, next to it. So the depth of the tree needs neither memory nor
    open files, and no path becomes too long. Raise OSError if something cannot be removed, such as a file of another
    user, and TimeoutError if another process writes faster than this one removes.
    """
    try:
        root = _open_folder(str(path), None)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    deadline = time.monotonic() + _REMOVE_SECONDS
    with _closing(root):
        while names := os.listdir(root):
            for name in names:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} was not removed within {_REMOVE_SECONDS:.0f} s.")
                _remove_top(name, root)
    os.rmdir(path)


def _remove_top(name: str, root: int) -> None:
    """Remove a file of `root`, or empty a folder of it: its folders move into `root`."""
    with contextlib.suppress(FileNotFoundError):
        if not _is_folder(name, root):
            os.unlink(name, dir_fd=root)
            return
        with _closing(_open_folder(name, root)) as folder:
            for inner in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    if not _is_folder(inner, folder):
                        os.unlink(inner, dir_fd=folder)
                        continue
                    os.close(_open_folder(inner, folder))  # a folder without permissions cannot be moved
                    os.rename(inner, secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=root)
        with contextlib.suppress(OSError):  # not empty yet, if another process writes: the next listing has it again
            os.rmdir(name, dir_fd=root)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _open_folder(name: str, parent: int | None) -> int:
    """Open a folder, which gets the permissions of its owner first. Raise NotADirectoryError for a link."""
    with _closing(os.open(name, _HANDLE | os.O_DIRECTORY, dir_fd=parent)) as handle:
        return os.open(_permitted(handle, 0o700), _FOLDER & ~os.O_NOFOLLOW)


def _open_file(name: str, parent: int | None) -> int:
    """Open a file to read it, which gets the permissions of its owner first. What is no file counts as vanished."""
    with _closing(os.open(name, _HANDLE, dir_fd=parent)) as handle:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return os.open(_permitted(handle, 0o400), _FILE & ~os.O_NOFOLLOW)


def _permitted(handle: int, wanted: int) -> str:
    """Return a path of an open handle, after its mode has the bits `wanted`."""
    path = f"/proc/self/fd/{handle}"
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    if mode & wanted != wanted:
        os.chmod(path, mode | wanted)
    return path


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
