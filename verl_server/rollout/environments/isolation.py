"""The isolation of a tool that runs a policy's code: bubblewrap, or no isolation if the caller requests it.

With bubblewrap the code has no network, sees only the system's programs (read-only), an empty /tmp and its own
processes, and no variables.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from verl_server.errors import BadRequestError

Isolation = Literal["bubblewrap", "none"]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


def check_isolation(isolation: str) -> None:
    """Raise BadRequestError unless this machine can isolate code, or the caller requested "none"."""
    if isolation not in ("bubblewrap", "none"):
        raise BadRequestError(f'isolation must be "bubblewrap" or "none", not {isolation!r}.')
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        raise BadRequestError(
            "A tool that runs a policy's code needs isolation, and there is no `bwrap` on PATH. Install bubblewrap "
            '(apt install bubblewrap), or accept that the code can do all that this user can: isolation="none".'
        )


def isolated(argv: Sequence[str], isolation: Isolation) -> list[str]:
    """Return the command that runs `argv` in bubblewrap, or `argv` itself if `isolation` is "none".

    Raise what `check_isolation` raises.
    """
    check_isolation(isolation)
    if isolation == "none":
        return list(argv)
    shown = [*_SYSTEM, sys.base_prefix, sys.prefix]
    binds = [word for path in dict.fromkeys(shown) if Path(path).exists() for word in ("--ro-bind", path, path)]
    bwrap = shutil.which("bwrap") or "bwrap"
    separate = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    own = ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev", "--chdir", "/tmp"]
    variables = ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"]
    return [bwrap, *separate, *binds, *own, *variables, "--", *argv]
