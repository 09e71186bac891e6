"""Files and folders that are complete or absent, also after a loss of power.

Everything is written under a temporary name, flushed to the disk, and then renamed; then the folder above is flushed.
Checkpoints, models, and the settings and summaries of runs are written by these functions.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from verl_server.errors import BadRequestError


def make_folder(folder: Path) -> None:
    """Create a folder unless it exists, with missing ones above it, and flush the names of all that are new.

    Raise BadRequestError, which names it, if it is a file or cannot be created.
    """
    try:
        new = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
        folder.mkdir(parents=True, exist_ok=True)
        for created in reversed(new):
            flush(created.parent)
    except (FileExistsError, NotADirectoryError):
        raise BadRequestError(f"{folder} cannot be a folder, because it or one above it is a file.") from None
    except (OSError, ValueError) as error:
        raise BadRequestError(f"The folder {folder} cannot be created: {error}.") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file, which is replaced if it exists."""
    temporary = _temporary(path)
    temporary.write_bytes(data)
    replace_file(temporary, path)


def replace_file(new: Path, path: Path) -> None:
    """Flush the file `new` to the disk, and rename it to `path` in the same folder."""
    flush(new)
    os.replace(new, path)
    flush(path.parent)


def temporary_folder(folder: Path) -> Path:
    """Create an empty temporary folder beside `folder`, and remove an earlier one.

    Fill it, then call `publish(folder)`.
    """
    temporary = _temporary(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def publish(folder: Path) -> None:
    """Flush the temporary folder of `folder` to the disk, and rename it to `folder`, which is replaced if it exists."""
    temporary, before = _temporary(folder), _before(folder)
    for path in (*temporary.rglob("*"), temporary):
        flush(path)
    if folder.exists():  # a folder with files cannot be replaced by one rename
        shutil.rmtree(before, ignore_errors=True)
        os.replace(folder, before)
    os.replace(temporary, folder)
    flush(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove the temporary folder of `folder`, and restore what `publish` had moved away if it was interrupted."""
    shutil.rmtree(_temporary(folder), ignore_errors=True)
    before = _before(folder)
    if before.exists() and not folder.exists():
        os.replace(before, folder)


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _before(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.before")
