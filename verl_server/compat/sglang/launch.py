"""`launch_server` and `kill_process_tree`, with the signatures that adapters use.

An adapter runs `launch_server` in a `multiprocessing.Process`, forked or spawned, and later kills this process. The
server's other processes end with it, because each of them watches a pipe of its parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from typing import Any

from verl_server.compat.sglang.server_args import TranslatedArgs

logger = logging.getLogger(__name__)

_GRACE = 15.0
"""Seconds after which a process that has not ended by itself is killed."""


def launch_server(server_args: TranslatedArgs, *unused: Any, **also_unused: Any) -> None:
    """Run a server with these settings in this process until SIGTERM. Raise BadRequestError for a refused setting."""
    from verl_server.server.launch import launch_server as launch

    settings = server_args.translated()
    logging.basicConfig(level=settings.log_level.upper())
    if settings.api_key is None:
        logger.warning(
            "The server at %s starts without a key, because SGLang's adapters send none: every %s can generate and "
            "replace the weights.",
            settings.url,
            "process on this host" if settings.is_loopback else "host that can connect",
        )
    launch(settings)


def kill_process_tree(parent_pid: int, wait_timeout: float | None = None) -> None:
    """End a process that `launch_server` runs in, and with it all processes of its server. Wait for the end.

    The process gets SIGTERM and, after `wait_timeout` (15 s by default), SIGKILL.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(parent_pid, signal.SIGTERM)
        if not _ended(parent_pid, _GRACE if wait_timeout is None else wait_timeout):
            os.kill(parent_pid, signal.SIGKILL)
            _ended(parent_pid, _GRACE)


def _ended(pid: int, timeout: float) -> bool:
    """Wait until a process ends, at most `timeout` seconds. An ended child stays for its `multiprocessing.Process`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
        except ChildProcessError:  # another process's child, or reaped already
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
        time.sleep(0.05)
    return False
