"""Folders that are complete or absent: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def temporary_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and then passed to `publish`. A left-over one is removed."""
    temporary = _temporary(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def publish(folder: Path) -> None:
    """Flush the temporary folder of `folder` to the disk, and rename it to `folder`, which is replaced if it exists."""
    temporary, before = _temporary(folder), folder.with_name(f".{folder.name}.before")
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)
    if folder.exists():  # a folder with files cannot be replaced by one rename
        shutil.rmtree(before, ignore_errors=True)
        os.replace(folder, before)
    os.replace(temporary, folder)
    _flush(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove the temporary folder of `folder`, and restore what `publish` had moved away if it was interrupted."""
    shutil.rmtree(_temporary(folder), ignore_errors=True)
    before = folder.with_name(f".{folder.name}.before")
    if before.exists() and not folder.exists():
        os.replace(before, folder)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
