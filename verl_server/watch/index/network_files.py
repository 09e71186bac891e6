"""Tells whether a folder is on a network, where a database is slow and its locks are not to be trusted."""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p"}


def is_on_network(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return True if the mount that has `folder` is of a network, or of a program (FUSE).

    False where nobody can tell.
    """
    try:
        device = os.stat(folder).st_dev
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        kind = rest.partition(" ")[0]
        if fields.split()[2:3] == [wanted]:
            return kind in _NETWORK or kind.partition(".")[0] == "fuse"
    return False
