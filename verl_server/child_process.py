"""A child that says when it is ready, why it failed, and never outlives its parent.

`ChildProcess` starts `python -m MODULE` with a JSON argument on stdin. Owned by whoever launches schedulers
(`server/launch.py`) or a whole server (`engine.HttpServerEngineAdapter`). A fresh interpreter rather than
`multiprocessing`: the user's `__main__` is not imported again, so no `if __name__ == "__main__"` guard is
needed, and neither CUDA state nor locks are inherited.

In the child, `child_main` runs the target, reports `ready(info)` or the traceback on a pipe, and watches a
second pipe whose other end only the parent holds: end-of-file means that the parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from verl_server.distributed import clean_child_env
from verl_server.errors import ServerLaunchError

_LOG_TAIL_LINES = 40


class ChildProcess:
    """Handle of a running child; create with `start`, then `wait_ready`.

    Thread-safe for `poll` and `terminate`. The child's stdout and stderr are passed on to this process's
    stderr line by line, and the last lines are kept for error messages.
    """

    def __init__(self, name: str, module: str, argument: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.name = name
        self._log_tail: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        status_r, status_w = os.pipe()
        alive_r, self._alive_w = os.pipe()
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-u", "-m", module, str(status_w), str(alive_r)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(status_w, alive_r),
                env=clean_child_env() | (env or {}),
                start_new_session=True,
            )
        finally:
            os.close(status_w)
            os.close(alive_r)
        self._status_r = status_r
        self._drain = threading.Thread(target=self._forward_log, name=f"{name}-log", daemon=True)
        self._drain.start()
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died at once: wait_ready tells why
            self.popen.stdin.write(json.dumps(argument).encode())
            self.popen.stdin.close()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_ready(self, timeout: float, also: Callable[[], None] | None = None) -> dict[str, Any]:
        """The child's `ready(info)`. Raises ServerLaunchError with its traceback and log tail, or on timeout.

        `also` is called several times a second and may raise, e.g. because a sibling died.
        """
        deadline = time.monotonic() + timeout
        data = b""
        while not data.endswith(b"\n"):
            if also is not None:
                also()
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerLaunchError(f"{self.name} was not ready within {timeout:.0f} s.{self.log_tail()}")
            if select.select([self._status_r], [], [], min(left, 0.2))[0]:
                chunk = os.read(self._status_r, 1 << 16)
                if not chunk:
                    code = self.popen.wait(timeout=10)
                    raise ServerLaunchError(
                        f"{self.name} exited with {describe_exit(code)} while starting.{self.log_tail()}"
                    )
                data += chunk
        status = json.loads(data)
        if "error" in status:
            raise ServerLaunchError(
                f"{self.name} failed while starting: {status['summary']}\n\n"
                f"Traceback in {self.name}:\n{status['error']}{self.log_tail()}"
            )
        info: dict[str, Any] = status["ready"]
        return info

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self.popen.poll()

    def log_tail(self) -> str:
        """The last lines of the child's output, as a paragraph to append to an error."""
        if self.popen.poll() is not None:
            self._drain.join(timeout=2)
        lines = list(self._log_tail)
        return f"\n\nLast lines of {self.name}'s log:\n" + "".join(lines) if lines else ""

    def terminate(self, grace: float = 10.0) -> int | None:
        """SIGTERM, then SIGKILL to its whole process group after `grace` seconds; waits. Idempotent."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(timeout=grace)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.popen.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(timeout=5)
        for attr in ("_alive_w", "_status_r"):
            fd = getattr(self, attr)
            if fd >= 0:
                setattr(self, attr, -1)
                os.close(fd)
        return self.popen.poll()

    def _forward_log(self) -> None:
        assert self.popen.stdout is not None
        for raw in self.popen.stdout:
            line = raw.decode(errors="replace")
            self._log_tail.append(line)
            with contextlib.suppress(ValueError, OSError):  # our own stderr was closed
                sys.stderr.write(line)


def describe_exit(code: int | None) -> str:
    """ "code 1" or "signal SIGKILL" for a subprocess return code."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"code {code}"


def child_main(target: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]) -> None:
    """Entry of a child module: `target(argument, ready)` runs until the child should exit.

    `ready(info)` may be called once. An exception is reported to the parent, printed, and exits with 1.
    """
    status_w, alive_r = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_die_with_parent, args=(alive_r,), name="parent-watch", daemon=True).start()

    def report(message: dict[str, Any]) -> None:
        nonlocal status_w
        if status_w >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(status_w, json.dumps(message).encode() + b"\n")
            os.close(status_w)
            status_w = -1

    try:
        argument = json.loads(sys.stdin.buffer.read())
        target(argument, lambda info: report({"ready": info}))
    except Exception as error:
        traceback.print_exc()
        report({"error": traceback.format_exc(), "summary": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of libraries must not keep a failed child alive


def _die_with_parent(alive_r: int) -> None:
    while os.read(alive_r, 1):
        pass
    # The parent is gone, and with it everyone who could wait for a graceful end. Children of this process
    # (a server's schedulers) see the same end-of-file as soon as this process is dead.
    os.kill(os.getpid(), signal.SIGKILL)
