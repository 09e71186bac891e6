"""Runs a program and ends it as a whole. `launched.py` starts this file as a script of its own.

It imports only the standard library, so that it starts in milliseconds under `python -I -S`. It is the subreaper of
all that the program starts: a descendant that called `setsid` and lost its parent becomes a child of this process.
The specification is one line of JSON on stdin. When stdin closes (the runner ended it, or died) or the program ends,
every descendant receives SIGTERM and, after the grace, SIGKILL. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
"""Seconds for descendants to end after SIGKILL."""


def main() -> None:
    """Run the program and print {"code": exit code, "left": descendants that outlived it, "ended": by the runner}."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    spec = json.loads(sys.stdin.buffer.readline())
    log = _Log(spec["log"], spec["log_bytes"])
    output_r, output_w = os.pipe()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for name, value in spec["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))

    try:
        program = subprocess.Popen(
            spec["argv"],
            env=spec["env"],
            cwd=spec["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=output_w,
            stderr=output_w,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": f"{spec['argv'][0]} does not start: {error}"}), flush=True)
        return
    finally:
        os.close(output_w)
    code, ended = _watch(program.pid, output_r, wake_r, log)
    left = _end_all(spec["grace"], program.pid if code is None else None)
    log.drain(output_r)
    if code is None:
        code = left.pop(program.pid, -signal.SIGKILL)
    print(json.dumps({"code": code, "left": len(left), "ended": ended}), flush=True)


class _Log:
    """The program's output in a file, up to a size. The rest is read and dropped."""

    def __init__(self, path: str, size: int) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (it lives as long as this process)
        self._left = size

    def write(self, data: bytes) -> None:
        if self._left > 0:
            self._file.write(data[: self._left])
            if len(data) >= self._left:
                self._file.write(b"\n... (the rest of the output was dropped)\n")
            self._left -= len(data)

    def drain(self, descriptor: int) -> None:
        """Read the rest of the data in the pipe."""
        os.set_blocking(descriptor, False)
        try:
            while data := os.read(descriptor, 65536):
                self.write(data)
        except BlockingIOError:
            pass


def _watch(program: int, output: int, wake: int, log: _Log) -> tuple[int | None, bool]:
    """Copy output until the program ends or stdin closes. Return (exit code or None, True if stdin closed)."""
    reading = [0, output, wake]
    while True:
        for ready in select.select(reading, [], [])[0]:
            data = os.read(ready, 65536)
            if ready == output:
                log.write(data)
                if not data:
                    reading.remove(output)
            elif ready == wake:
                codes = _reap()
                if program in codes:
                    return codes[program], False
            elif not data:
                return None, True


def _reap() -> dict[int, int]:
    """Collect the children that have ended, and return pid → exit code."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid == 0:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def _end_all(grace: float, program: int | None) -> dict[int, int]:
    """End every descendant, and return the exit codes that this process collected.

    If the program has ended by itself, its descendants are killed without a grace.
    """
    ended = _reap()
    if program is not None:
        _send(signal.SIGTERM)
        ended |= _wait_all(grace, None)
    return ended | _wait_all(_KILL_SECONDS, signal.SIGKILL)


def _wait_all(seconds: float, again: int | None) -> dict[int, int]:
    """Wait until there is no descendant. Send the signal `again` to the remaining descendants during the wait."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while True:
        if again is not None:
            _send(again)
        codes |= _reap()
        if not _descendants() or time.monotonic() > deadline:
            return codes
        time.sleep(0.01)


def _send(number: int) -> None:
    for pid in _descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _descendants() -> list[int]:
    """Return all living descendants of this process, without zombies."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            parents[int(name)] = (int(parent), state)
    found = {os.getpid()}
    while True:
        more = {pid for pid, (parent, _) in parents.items() if parent in found and pid not in found}
        if not more:
            break
        found |= more
    return [pid for pid in found - {os.getpid()} if parents[pid][1] not in "ZX"]


def run_main() -> Any:
    """Run `main` and leave without the interpreter's cleanup, which could wait for a thread."""
    main()
    os._exit(0)


if __name__ == "__main__":
    run_main()
