"""Child processes that report when they are ready or why they failed, and that end with their parent.

`ChildProcess` starts `python -m MODULE` with a JSON argument on stdin. `server/launch.py` starts schedulers with it,
and `engine.HttpServerEngineAdapter` starts whole servers. The child is a new interpreter instead of a `multiprocessing`
child. So the user's `__main__` is not imported again and needs no `if __name__ == "__main__"` guard, and neither CUDA
state nor locks are inherited.

In the child, `child_main` runs the target, reports `ready(info)` or the error on a pipe, and watches its parent:
end-of-file on a second pipe, or another parent pid, means that the parent has ended. (A child that is in native code
and holds the interpreter lock notices this only after it has released the lock.)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from verl_server.errors import ServerLaunchError, VerlServerError
from verl_server.ipc.child_env import clean_child_env

_LOG_TAIL_LINES = 40
_LOG_LINE_BYTES = 4096
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class ChildProcess:
    """A running child. The constructor starts it; then call `wait_ready`.

    `poll` and `terminate` may be called from any thread. The child's output is written to this process's stderr line by
    line, and the last lines are kept for error messages.
    """

    def __init__(
        self,
        name: str,
        module: str,
        argument: dict[str, Any],
        env: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        """Start the child. It inherits the descriptors `pass_fds` by their numbers, which `argument` must name."""
        self.name = name
        self._lock = threading.Lock()
        self._log_tail: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._status_r, status_w = os.pipe()
        alive_r, self._alive_w = os.pipe()
        ends = (status_w, alive_r, os.getpid())
        try:
            self.popen = subprocess.Popen(
                # -P: a file in the user's folder must not shadow a module of the standard library.
                [sys.executable, "-u", "-P", "-X", "faulthandler", "-m", module, *map(str, ends)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(status_w, alive_r, *pass_fds),
                env=_child_env(env),
                start_new_session=True,  # Ctrl-C interrupts only the parent, which then ends its children in order
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(status_w)
            os.close(alive_r)
        self._drain = threading.Thread(target=self._forward_log, name=f"{name}-log", daemon=True)
        self._drain.start()
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child has ended already: wait_ready raises the reason
            self.popen.stdin.write(json.dumps(argument).encode() + b"\n")
            self.popen.stdin.close()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_ready(self, timeout: float, also: Callable[[], None] | None = None) -> dict[str, Any]:
        """Wait for the child's `ready(info)` and return the info. Raise ServerLaunchError on failure or timeout.

        The error has the message of the child's error. Unless that is a `VerlServerError`, the traceback and the end of
        the child's log are added. `also` is called several times a second, and may raise, for example because a sibling
        has died.
        """
        deadline = time.monotonic() + timeout
        poller = select.poll()
        poller.register(self._status_r, select.POLLIN | select.POLLHUP)
        data = b""
        while not data.endswith(b"\n"):
            if also is not None:
                also()
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerLaunchError(
                    f"{self.name} was not ready within {timeout:.0f} s (raise startup_timeout if it is only slow)."
                    + self.log_tail()
                )
            code = self.popen.poll()  # before reading, so that the child's last message is still read
            chunk = b""
            if poller.poll(0 if code is not None else min(left, 0.2) * 1000):
                chunk = os.read(self._status_r, 1 << 16)
                data += chunk
            if code is not None and not chunk:
                raise ServerLaunchError(
                    f"{self.name} exited with {describe_exit(code)} while starting.{self.log_tail()}"
                )
            if not chunk and code is None:
                time.sleep(0.01 if poller.poll(0) else 0)  # the pipe is at its end: the child is about to exit
        status = json.loads(data)
        if "error" in status:
            message = str(status["error"])
            if status["traceback"]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(timeout=2)  # the child is ending; its log is complete after that
                message = f"{self.name} failed while starting: {message}\n\n"
                message += f"Traceback in {self.name}:\n{status['traceback']}{self.log_tail()}"
            raise ServerLaunchError(message)
        info: dict[str, Any] = status["ready"]
        return info

    def poll(self) -> int | None:
        """Return the exit code, or None while the child runs."""
        return self.popen.poll()

    def log_tail(self) -> str:
        """Return the last lines of the child's output, as a paragraph to append to an error."""
        if self.popen.poll() is not None:
            self._drain.join(timeout=2)
        lines = list(self._log_tail)
        return f"\n\nLast lines of {self.name}'s log:\n" + "".join(lines) if lines else ""

    def terminate(self, grace: float = 10.0) -> int | None:
        """Send SIGTERM, after `grace` seconds SIGKILL to the child's process group, and wait. Idempotent.

        Return the exit code, or None if the child has not ended 5 seconds after SIGKILL.
        """
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(timeout=grace)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.popen.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(timeout=5)
        self._close_pipes()
        return self.popen.poll()

    def _close_pipes(self) -> None:
        with self._lock:
            for attr in ("_alive_w", "_status_r"):
                fd = getattr(self, attr)
                setattr(self, attr, -1)
                if fd >= 0:
                    os.close(fd)

    def _forward_log(self) -> None:
        pipe = self.popen.stdout
        assert pipe is not None
        rest = b""
        while chunk := os.read(pipe.fileno(), 1 << 16):
            # Carriage returns of a progress bar end lines, too. A line that is too long is cut.
            *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
            if len(rest) > _LOG_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._pass_on(lines)
        self._pass_on([rest] if rest else [])

    def _pass_on(self, lines: list[bytes]) -> None:
        for raw in lines:
            line = raw[:_LOG_LINE_BYTES].decode(errors="replace") + "\n"
            self._log_tail.append(line)
            with contextlib.suppress(ValueError, OSError, AttributeError):  # this process's stderr is closed or None
                sys.stderr.write(line)


def _child_env(extra: dict[str, str] | None) -> dict[str, str]:
    env = clean_child_env() | (extra or {})
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_ROOT, env.get("PYTHONPATH")]))
    return env


def describe_exit(code: int | None) -> str:
    """Return a subprocess's return code as text: "code 1" or "signal SIGKILL"."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"code {code}"


def child_main(target: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]) -> NoReturn:
    """Run `target(argument, ready)` as the entry of a child module, then exit.

    The target calls `ready(info)` once. An error before that call is reported to the parent, whose `wait_ready` raises
    it; a later error is logged. Threads of libraries do not keep the process alive. `argument["leftovers"]` are folders
    of the parent: the child removes them if the parent is killed and cannot remove them.
    """
    status_w, alive_r, parent_pid = (int(arg) for arg in sys.argv[1:4])
    for fd in (status_w, alive_r):
        os.set_inheritable(fd, False)  # a grandchild that held them would hide the end of this process from the parent
    leftovers: list[str] = []
    watch = (alive_r, parent_pid, leftovers)
    threading.Thread(target=_die_with_parent, args=watch, name="parent-watch", daemon=True).start()

    def report(message: dict[str, Any]) -> bool:
        """Send `message` to the parent. Return False if a message was sent already, or if the parent has closed."""
        nonlocal status_w
        fd, status_w = status_w, -1
        if fd < 0:
            return False
        with open(fd, "wb", buffering=0) as pipe:
            try:
                pipe.write(json.dumps(message).encode() + b"\n")
            except BrokenPipeError:
                return False
        return True

    def ready(info: dict[str, Any]) -> None:
        report({"ready": info})

    code = 0
    try:
        argument = json.loads(sys.stdin.buffer.readline())
        leftovers += argument.get("leftovers", [])
        target(argument, ready)
        report({"error": "it returned before it was ready", "traceback": "(none)\n"})
    except BaseException as error:
        is_failure = not (isinstance(error, SystemExit) and error.code in (0, None))
        code = int(is_failure)
        if not report(_describe(error)) and is_failure:
            traceback.print_exc()
            first, *more = str(error).splitlines() or [""]
            if more:  # repeated, because the lines of a long message (a child's log) may displace its first line
                print(f"{type(error).__name__}: {first}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _describe(error: BaseException) -> dict[str, str]:
    """Return the message that `wait_ready` reads. A `VerlServerError` has no traceback: its message is sufficient."""
    if isinstance(error, VerlServerError):
        return {"error": str(error), "traceback": ""}
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without `child_main` itself
    return {
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(type(error), error, inner)),
    }


def _die_with_parent(alive_r: int, parent_pid: int, leftovers: list[str]) -> None:
    poller = select.poll()
    poller.register(alive_r, select.POLLIN | select.POLLHUP)
    # The parent pid is checked as well: a process that the parent forked keeps the pipe open after the parent's end.
    while not poller.poll(1000) and os.getppid() == parent_pid:
        pass
    # Without the parent, no process waits for a graceful end. Children of this process (a server's schedulers) notice
    # the end of this process in the same way.
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
