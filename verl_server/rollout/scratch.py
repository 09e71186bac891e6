"""`private_folder`: temporary folders of episodes, which a process that is killed does not leave behind for ever.

The homes of programs and the workspaces of tasks are below one root for each process. The process holds a lock of its
root as long as it lives. A process that was killed leaves its root; the next process that needs one removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import logging
import os
import tempfile
from pathlib import Path

from verl_server.files.trees import remove_tree

logger = logging.getLogger(__name__)

_PREFIX = "verl-scratch-"


def private_folder(name: str) -> Path:
    """Create an empty folder, which other users cannot read. Its name begins with `name`.

    The caller removes it (`remove_folder`). What is left is removed at the end of the process.
    """
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=private_root()))


def remove_folder(folder: Path) -> None:
    """Remove a folder with whatever a program left in it. Log a warning if something stays."""
    try:
        remove_tree(folder)
    except OSError as error:
        logger.warning("The temporary folder %s was not removed: %s. Remove it by hand.", folder, error)


@functools.cache
def private_root() -> Path:
    """Return the root of this process, which is locked until the process ends.

    The first call creates it, and removes the roots of dead processes, which may take seconds.
    """
    place = Path(tempfile.gettempdir())
    _remove_dead(place)
    while True:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # closed by the process's end
        except FileNotFoundError:  # another process took it for a dead one's before it was locked, and removed it
            continue
        if _locks(descriptor) and root.exists():
            atexit.register(remove_folder, root)
            return root
        os.close(descriptor)  # the other process is about to remove it


def _remove_dead(place: Path) -> None:
    """Remove the roots whose processes have ended."""
    for root in place.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid() and _locks(descriptor):
                remove_folder(root)
        finally:
            os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
