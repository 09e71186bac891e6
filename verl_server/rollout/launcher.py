"""Runs a program and ends it as a whole. `launched.py` starts this file as a script of its own.

It imports only the standard library, so that it starts in milliseconds under `python -I -S`. It is the subreaper of
all that the program starts: a descendant that called `setsid` and lost its parent becomes a child of this process.
The specification is one line of JSON on stdin. When stdin closes (the runner ended it, or died) or the program ends,
every descendant receives SIGTERM and, after the grace, SIGKILL. The last line on stdout is the result as JSON.

An isolated program is bubblewrap, which starts `agents/bridge.py`, which starts the program. The bridge says on a
descriptor of its own how far it came, so that a fault of the isolation is no fault of the program.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
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
_STATUS_DESCRIPTOR = 200
"""Descriptor of the bridge's status, as in `agents/bridge.py`."""
_OPTIONS_DESCRIPTOR = 201
"""Descriptor from which bubblewrap reads its options, which name folders of the user. All can read a command line."""
_KILL_SECONDS = 10.0
"""Seconds for descendants to end after SIGKILL."""


def main() -> None:
    """Run the program and print {"code": exit code, "left": descendants that outlived it, "ended": by the runner}.

    "exceeded" is there, too, if the bridge ended an isolated program that exceeded a bound, and says which one.

    Print {"error": cause} if the program did not start, with "isolation": true if that is a fault of the isolation.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    spec = json.loads(sys.stdin.buffer.readline())
    log = _Log(spec["log"], spec["log_bytes"])
    output_r, output_w = os.pipe()
    outputs: dict[int, list[_Log | _Tail]] = {output_r: [log]}
    stdout_w = output_w
    if spec["stdout"] is not None:
        stdout_r, stdout_w = os.pipe()
        stdout = _Tail(spec["stdout_bytes"])
        outputs[stdout_r] = [log, stdout]
    argv, passed, status_r = spec["argv"], [], -1
    if spec["is_isolated"]:
        passed = [_STATUS_DESCRIPTOR, _OPTIONS_DESCRIPTOR]
        status_r, status_w = os.pipe()
        os.dup2(status_w, _STATUS_DESCRIPTOR)
        os.close(status_w)
        split = argv.index("--")
        options = _file_of("\0".join(argv[1:split]))
        os.dup2(options, _OPTIONS_DESCRIPTOR)
        os.close(options)
        argv = [argv[0], "--args", str(_OPTIONS_DESCRIPTOR), *argv[split:]]
    stdin = subprocess.DEVNULL if spec["stdin"] is None else _file_of(spec["stdin"])

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for name, value in spec["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))

    try:
        program = subprocess.Popen(
            argv,
            env=spec["env"],
            cwd=spec["cwd"],
            stdin=stdin,
            stdout=stdout_w,
            stderr=output_w,
            start_new_session=True,
            preexec_fn=prepare,
            pass_fds=passed,
        )
    except (OSError, subprocess.SubprocessError) as error:
        result = {"error": f"{spec['argv'][0]} does not start: {error}", "isolation": spec["is_isolated"]}
        print(json.dumps(result), flush=True)
        return
    finally:
        for descriptor in {output_w, stdout_w, *passed}:
            os.close(descriptor)
    code, ended = _watch(program.pid, outputs, wake_r)
    left = _end_all(spec["grace"], code is None, program.pid if spec["is_isolated"] else None)
    for descriptor, files in outputs.items():
        _drain(descriptor, files)
    if spec["stdout"] is not None:
        stdout.save(spec["stdout"])
    if code is None:
        code = left.pop(program.pid, -signal.SIGKILL)
    result = {"code": code, "left": len(left), "ended": ended}
    if spec["is_isolated"]:
        result |= _isolated_end(code, ended, status_r)
    print(json.dumps(result), flush=True)


def _isolated_end(code: int, ended: bool, status: int) -> dict[str, Any]:
    """Return what the bridge's status changes in the result. `code` is the exit code of bubblewrap."""
    os.set_blocking(status, False)
    try:
        lines = os.read(status, 65536).splitlines()
    except BlockingIOError:
        lines = []
    said: dict[str, Any] = {}
    for line in lines:
        said |= json.loads(line)
    if "code" in said:
        return {"code": said["code"], "exceeded": said.get("exceeded", "")}
    if "failed" in said:
        return {"error": f"the bridge of the sandbox failed: {said['failed']}", "isolation": True}
    if "unstarted" in said:
        return {"error": said["unstarted"], "isolation": True}
    if "started" not in said and not ended:
        cause = f"bubblewrap ended with exit code {code} before it started the program. Its output has the cause"
        return {"error": f"{cause}; --isolation none runs the program without it", "isolation": True}
    return {"code": 128 - code if code > 128 else code}  # a signal ended the bridge, or all of the sandbox


def _file_of(text: str) -> int:
    """Return a descriptor that reads a text, which no process can change."""
    writing = os.memfd_create("verl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(writing, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        file.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)


class _Tail:
    """The last bytes of the program's standard output."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: collections.deque[bytes] = collections.deque()
        self._held = 0

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)
        while self._held - len(self._parts[0]) >= self._size:
            self._held -= len(self._parts.popleft())

    def save(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"".join(self._parts)[-self._size :])


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


def _drain(descriptor: int, files: list[_Log | _Tail]) -> None:
    """Read the rest of the data in a pipe."""
    os.set_blocking(descriptor, False)
    try:
        while data := os.read(descriptor, 65536):
            for file in files:
                file.write(data)
    except BlockingIOError:
        pass


def _watch(program: int, outputs: dict[int, list[_Log | _Tail]], wake: int) -> tuple[int | None, bool]:
    """Copy output until the program ends or stdin closes. Return (exit code or None, True if stdin closed)."""
    reading = [0, wake, *outputs]
    while True:
        for ready in select.select(reading, [], [])[0]:
            data = os.read(ready, 65536)
            if ready in outputs:
                for file in outputs[ready]:
                    file.write(data)
                if not data:
                    reading.remove(ready)
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


def _end_all(grace: float, is_gentle: bool, sandbox: int | None) -> dict[int, int]:
    """End every descendant, and return the exit codes that this process collected.

    With `is_gentle`, they get SIGTERM and the grace first. `sandbox` is the process of bubblewrap if the program is
    isolated: it gets no SIGTERM, and the end of bubblewrap is the end of everything in it.
    """
    ended = _reap()
    if is_gentle:
        _send(signal.SIGTERM, sandbox)
        ended |= _wait_all(grace, None) if sandbox is None else _wait_children(grace)
    if sandbox is None:
        return ended | _wait_all(_KILL_SECONDS, signal.SIGKILL)
    if is_gentle and sandbox not in ended:
        os.kill(sandbox, signal.SIGKILL)  # the kernel ends all that is in it
    return ended | _wait_children(_KILL_SECONDS)


def _wait_children(seconds: float) -> dict[int, int]:
    """Wait until this process has no child. All that a sandbox leaves behind becomes a child of this process."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes |= _reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        time.sleep(0.01)
    return codes


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


def _send(number: int, without: int | None = None) -> None:
    for pid in _descendants():
        if pid != without:
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
