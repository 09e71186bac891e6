"""Files that a program which is not trusted has left: read one, remove all. Links and pipes are never followed.

The program may have written anything: a link to a file of the user in the place of its result, a pipe that blocks its
reader, names that are no text, folders without permissions, or folders that are nested 10,000 deep.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_MOST_PASSES = 1000


def read_left(root: Path, name: str, most: int) -> bytes | None:
    """Return the first `most` bytes of the regular file `name` below the folder `root`. None if there is none.

    A link on the way below `root`, a pipe, a socket or a device counts as no file.
    """
    folder = _opened(root, os.O_DIRECTORY | os.O_NOFOLLOW)
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ValueError(f"{name!r} is no path below a folder")
    for part in parts:
        if folder is None:
            return None
        is_last = part is parts[-1]
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | (0 if is_last else os.O_DIRECTORY)
        inner = _opened(part, flags, folder)
        os.close(folder)
        folder = inner
    if folder is None:
        return None
    try:
        return _content(folder, most) if stat.S_ISREG(os.fstat(folder).st_mode) else None
    finally:
        os.close(folder)


def _content(descriptor: int, most: int) -> bytes:
    parts, left = [], most
    while left > 0 and (data := os.read(descriptor, min(left, 2**20))):
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def _opened(path: str | Path, flags: int, folder: int | None = None) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError:
        return None


def remove_left(root: Path) -> None:
    """Remove a folder with all that is in it. Nothing is raised: what cannot be removed stays.

    Inner folders are moved to the top before they are emptied, so neither the depth of folders nor the length of paths
    is bounded.
    """
    number = 0
    for _ in range(_MOST_PASSES):
        waiting = [os.fsencode(root)]
        moved = 0
        while waiting:
            folder = waiting.pop()
            found, number = _emptied(folder, os.fsencode(root), number)
            waiting += found
            moved += len(found)
            if folder != os.fsencode(root):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        with contextlib.suppress(OSError):
            os.rmdir(root)
        if not os.path.lexists(root) or not moved:
            return


def _emptied(folder: bytes, top: bytes, number: int) -> tuple[list[bytes], int]:
    """Unlink the files of a folder and move its folders to `top`. Return the moved folders and the next free number."""
    moved: list[bytes] = []
    try:
        os.chmod(folder, 0o700, follow_symlinks=False) if os.chmod in os.supports_follow_symlinks else os.chmod(
            folder, 0o700
        )
        entries = list(os.scandir(folder))
    except OSError:
        return moved, number
    for entry in entries:
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            if folder == top:
                moved.append(entry.path)
                continue
            os.chmod(entry.path, 0o700)  # a folder can be moved only by who may write to it
            while os.path.lexists(target := os.path.join(top, b"left-%d" % number)):
                number += 1
            os.rename(entry.path, target)
            moved.append(target)
    return moved, number
