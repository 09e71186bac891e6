"""Start child processes by fork instead of as fresh interpreters, for tests only: an import of torch takes seconds.

`install` starts one fork server for each test run; workers of pytest-xdist share it. The fork server imports what
servers, schedulers and ranks import, runs no operator (so that no thread pool exists), and forks itself for every
`ForkedProcess`, a `subprocess.Popen` whose child runs the same module with the same arguments, environment and
descriptors. Children fork their own children in the same way.

A child of the fork server differs from a real one in two points: libraries have read their environment variables
already, and the parent of the child is the fork server (`os.getppid` is replaced, so that it returns what it would
return in a real child). Tests of processes themselves use real ones (the fixture `real_processes`), and so does every
test when VERL_SERVER_TEST_PROCESSES is "real".
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "uvicorn",
    "httpx",
    "verl_server.engine.verl_engine",
    "verl_server.server.launch",
    "verl_server.scheduler.process",
    "verl_server.scheduler.rank",
    "verl_server.server.http_process",
    "verl_server.server.tokenizer_manager",
    "verl_server.train.grpo",
)
_ADDRESS = "VERL_SERVER_TEST_FORK_SERVER"
_MOST_DESCRIPTORS = 64
_LENGTH_BYTES = 8
_LOST = -signal.SIGKILL
"""Exit code of a child whose fork server has ended."""


# -- the process that starts a child -----------------------------------------------------------------------------


class ForkedProcess(subprocess.Popen[bytes]):
    """A `subprocess.Popen` of `python [options] -m MODULE ARGUMENTS` whose child is forked by the fork server."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:  # type: ignore[override]
        cwd, env = rest[0], rest[1]
        pipes = p2cread, _, _, c2pwrite, _, errwrite = rest[5:11]
        command = list(args)
        module = command.index("-m")
        streams = {0: p2cread, 1: c2pwrite, 2: errwrite if errwrite != -1 else c2pwrite}
        descriptors = {number: fd for number, fd in streams.items() if fd != -1} | {fd: fd for fd in pass_fds}
        environment = dict(os.environ if env is None else env)
        request = {
            "argv": [os.fspath(part) for part in command[module + 1 :]],
            "env": environment,
            "cwd": os.fspath(cwd or os.getcwd()),
            "descriptors": list(descriptors),
        }
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(os.environ[_ADDRESS])
        body = json.dumps(request).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors.values()))]
        self._link.sendmsg([len(body).to_bytes(_LENGTH_BYTES, "little")], ancillary)
        self._link.sendall(body)
        self.pid = int.from_bytes(_exactly(self._link, 4), "little")
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:  # type: ignore[override]
        return self._read_exit(0.0)

    def _wait(self, timeout: float | None) -> int:
        code = self._read_exit(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _read_exit(self, timeout: float | None) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and _readable(self._link, timeout):
                status = self._link.recv(4)
                self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else _LOST
                self._link.close()
            return self.returncode


def install() -> None:
    """Start the fork server, and make this process start its children through it."""
    folder = tempfile.mkdtemp(prefix="fork-server-")
    os.environ[_ADDRESS] = str(Path(folder) / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[_ADDRESS])
    listener.listen(64)
    from verl_server.ipc.child_env import clean_child_env

    root = str(Path(__file__).parents[1])
    env = clean_child_env() | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    alive_r, _alive_w = os.pipe()  # the fork server ends when this process ends
    command = [
        sys.executable,
        "-u",
        "-X",
        "faulthandler",
        "-m",
        "tests.fork_server",
        str(listener.fileno()),
        str(alive_r),
    ]
    subprocess.Popen(command, pass_fds=(listener.fileno(), alive_r), env=env)
    listener.close()
    os.close(alive_r)
    use_forks()


def use_forks() -> None:
    """Make `ChildProcess` and `GlooMember` of this process fork their children. Every forked child calls this, too."""
    names = ("PIPE", "STDOUT", "DEVNULL", "TimeoutExpired")
    stand_in = types.SimpleNamespace(Popen=ForkedProcess, **{name: getattr(subprocess, name) for name in names})
    for module in _modules_that_start_children():
        module.subprocess = stand_in  # type: ignore[attr-defined]


def _modules_that_start_children() -> list[types.ModuleType]:
    from verl_server.ipc import child_process
    from verl_server.weight_sync.group import gloo_member

    return [child_process, gloo_member]


@contextlib.contextmanager
def real_processes() -> Iterator[None]:
    """Within this context, this process starts its children as fresh interpreters, as it does outside tests."""
    for module in _modules_that_start_children():
        module.subprocess = subprocess  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if is_running():
            use_forks()


def is_running() -> bool:
    return _ADDRESS in os.environ


def run_module(module: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[Any]:
    """Run `python -m MODULE ARGUMENTS` with the options of `subprocess.Popen`; fork it if a fork server runs."""
    command = [sys.executable, "-m", module, *map(os.fspath, arguments)]
    return (ForkedProcess if is_running() else subprocess.Popen)(command, **options)


# -- the fork server ---------------------------------------------------------------------------------------------


def serve(listener: socket.socket, alive: int) -> NoReturn:
    """Fork a child for every connection, and send the child's exit status over the connection when the child ends."""
    bell_r, bell_w = os.pipe()
    os.set_blocking(bell_w, False)
    signal.set_wakeup_fd(bell_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    links: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, alive, bell_r], [], [])
        if alive in ready:
            os._exit(0)
        if bell_r in ready:
            os.read(bell_r, 4096)
            _report_ends(links)
        if listener in ready:
            link, _ = listener.accept()
            with contextlib.suppress(EOFError):  # the process that connected has ended
                request, descriptors = _receive(link)
                pid = os.fork()
                if pid == 0:
                    inherited = [
                        listener.fileno(),
                        alive,
                        bell_r,
                        bell_w,
                        *(other.fileno() for other in links.values()),
                    ]
                    _become_child(request, descriptors, link, inherited)
                links[pid] = link
                link.sendall(pid.to_bytes(4, "little"))
                for fd in descriptors:
                    os.close(fd)


def _report_ends(links: dict[int, socket.socket]) -> None:
    while links:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(OSError):  # the process that started this child has ended
            links[pid].sendall(status.to_bytes(4, "little"))
        links.pop(pid).close()


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, ancillary, _, _ = link.recvmsg(_LENGTH_BYTES, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) // 4 * 4])
    return json.loads(_exactly(link, int.from_bytes(length, "little"))), list(descriptors)


def _become_child(
    request: dict[str, Any], descriptors: list[int], link: socket.socket, inherited: list[int]
) -> NoReturn:
    """Take on the child's environment and descriptors, then run its module. Runs in the child; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        parent = int.from_bytes(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        for fd in inherited:
            os.close(fd)
        link.close()
        _place(dict(zip(request["descriptors"], descriptors, strict=True)))
        _answer_getppid(parent)  # its descriptor must not have a number that `_place` takes
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path]
        if threads := os.environ.get("OMP_NUM_THREADS"):
            importlib.import_module("torch").set_num_threads(int(threads))
        os.chdir(request["cwd"])
        module, *arguments = request["argv"]
        sys.argv = [module, *arguments]
        warnings.filterwarnings("ignore", "found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _place(wanted: dict[int, int]) -> None:
    """Move descriptors to the numbers that the child expects, without overwriting any of them on the way."""
    lowest = max(wanted, default=2) + 1
    import fcntl

    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, lowest) for number, fd in wanted.items()}
    for fd in wanted.values():
        os.close(fd)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)


def _answer_getppid(parent: int) -> None:
    """Make `os.getppid` return the process that started this child while that process lives, and 1 afterwards."""
    try:
        from verl_server.ipc.readiness import wait_readable

        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os.getppid = lambda: 1
        return
    os.getppid = lambda: 1 if wait_readable(watched, 0) else parent


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def _readable(link: socket.socket, timeout: float | None) -> bool:
    poller = select.poll()
    poller.register(link, select.POLLIN | select.POLLHUP)
    return bool(poller.poll(None if timeout is None else max(0.0, timeout) * 1000))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    listening, watched_pipe = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from tests import fork_server as this  # forked children use this module, not __main__

    this.use_forks()
    gc.collect()
    gc.freeze()
    this.serve(listening, watched_pipe)
