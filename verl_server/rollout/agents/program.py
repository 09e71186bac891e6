"""An agent that is a program: a subprocess in an environment that is built from nothing.

`episode.py` starts it. The program sees the base URL and the key of its own session, never the owner's key. A
launcher (`launcher.py`) runs it with resource limits, keeps a bounded part of its output, and ends it with all of its
descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.rollout.agents.types import AgentLimits, AgentSession, AgentTask

_LAUNCHER = Path(__file__).with_name("launcher.py")
_TAIL_BYTES = 4000
_EXIT_SECONDS = 15.0
"""Time for the launcher to end all descendants, beside the grace of the limits."""
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_RESERVED = ("VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY")


@dataclass(frozen=True)
class Exit:
    """The end of a program."""

    code: int | None
    """Exit code; negative: a signal. None: the program did not start, or the launcher was killed."""
    output: str
    """The last lines of its output."""
    error: str | None = None


def check_program(argv: Sequence[str], pass_env: Sequence[str]) -> list[str]:
    """Return the command with the path of its program. Raises BadRequestError if there is none."""
    if not argv:
        raise BadRequestError("The agent's command is empty: pass a list such as ['python', 'my_agent.py'].")
    refused = [name for name in pass_env if name in _RESERVED]
    if refused:
        raise BadRequestError(f"pass_env must not name {refused[0]}: no agent receives the owner's key.")
    found = shutil.which(argv[0])
    if found is None:
        raise BadRequestError(f"There is no program {argv[0]!r} on PATH or at this path (folder {os.getcwd()}).")
    return [os.path.abspath(found), *argv[1:]]


async def run_program(
    argv: Sequence[str],
    session: AgentSession,
    task: AgentTask,
    *,
    limits: AgentLimits,
    log: Path,
    environment_url: str | None,
    pass_env: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Exit:
    """Run the program to its end. A cancelled call ends the program and all of its descendants first.

    `about` is added to the task file, which has `input`, `seed` and the tools of the environment.
    """
    folder = Path(tempfile.mkdtemp(prefix="verl-agent-"))
    try:
        task_file = folder / "task.json"
        tools = session.environment.tools if session.environment is not None else []
        task_file.write_bytes(
            msgspec.json.encode({"input": task.input, "seed": task.seed, "tools": tools, **(about or {})})
        )
        spec = {
            "argv": list(argv),
            "cwd": os.getcwd(),
            "env": _environment(session, folder, task_file, environment_url, pass_env),
            "limits": _resource_limits(limits),
            "log": str(log),
            "log_bytes": limits.log_bytes,
            "grace": limits.kill_grace,
        }
        return await _launched(spec, log, limits)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _launched(spec: dict[str, Any], log: Path, limits: AgentLimits) -> Exit:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", str(_LAUNCHER)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.defpath, "LANG": "C.UTF-8"},
        start_new_session=True,  # Ctrl-C reaches the runner only, which then ends the programs
    )
    assert launcher.stdin is not None and launcher.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        launcher.stdin.write(json.dumps(spec).encode() + b"\n")
        await launcher.stdin.drain()
    reading = asyncio.ensure_future(launcher.stdout.read())
    try:
        answer = await asyncio.shield(reading)
    except asyncio.CancelledError:
        launcher.stdin.close()  # the launcher ends everything
        await _ended(launcher, reading, limits.kill_grace + _EXIT_SECONDS)
        raise
    launcher.stdin.close()
    await _ended(launcher, reading, limits.kill_grace + _EXIT_SECONDS)
    return _exit(answer, await asyncio.to_thread(tail, log), spec["env"]["OPENAI_API_KEY"])


async def _ended(launcher: asyncio.subprocess.Process, reading: asyncio.Future[bytes], seconds: float) -> None:
    """Wait for the launcher. A second cancellation does not interrupt this wait."""

    async def wait() -> None:
        try:
            async with asyncio.timeout(seconds):
                await reading
                await launcher.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()
            await launcher.wait()

    waiting = asyncio.ensure_future(wait())
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(waiting)


def _exit(answer: bytes, output: str, key: str) -> Exit:
    try:
        result = json.loads(answer.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        kill_marked(key)
        return Exit(None, output, "the launcher of the program was killed")
    if "error" in result:
        return Exit(None, output, result["error"])
    return Exit(result["code"], output)


def kill_marked(key: str) -> int:
    """Kill every process whose environment has this session key. Returns the number of them.

    It finds what a program left behind after it had killed its own launcher.
    """
    killed, mark = 0, f"OPENAI_API_KEY={key}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
    return killed


def _environment(
    session: AgentSession, folder: Path, task_file: Path, environment_url: str | None, pass_env: Sequence[str]
) -> dict[str, str]:
    """The whole environment of the program."""
    env = {name: os.environ[name] for name in pass_env if name in os.environ}
    env |= {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "VERL_TASK_FILE": str(task_file),
    }
    if environment_url is not None:
        env["VERL_ENVIRONMENT_URL"] = environment_url
    return env


def _resource_limits(limits: AgentLimits) -> dict[str, int]:
    wanted = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def tail(log: Path) -> str:
    """The last lines of a program's output, "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def memory_hidden() -> Iterator[None]:
    """Keep other processes of this user from reading the memory and the environment of this one (Linux)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "prctl"):
        yield
        return
    before = libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_DUMPABLE, before, 0, 0, 0)


def take_from_environment(name: str) -> str | None:
    """Remove a variable from `os.environ`, and overwrite its value where /proc/PID/environ shows it."""
    value = os.environ.get(name)
    if value is None:
        return None
    with contextlib.suppress(AttributeError, OSError):
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        address = getenv(name.encode())
        if address:
            ctypes.memset(address, ord("x"), len(os.fsencode(value)))
    del os.environ[name]
    return value
