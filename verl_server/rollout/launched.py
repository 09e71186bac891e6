"""Runs programs that are not trusted, with limits and given environment variables. Ends them with all descendants.

Agents that are programs and the code tool use it. `launcher.py` is the process between this one and the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

_LAUNCHER = Path(__file__).with_name("launcher.py")
_TAIL_BYTES = 4000
_EXIT_SECONDS = 15.0
"""Seconds for the launcher to end all descendants, in addition to the grace."""
_launchers: dict[Path, int] = {}
"""Log of each program that runs -> process id of its launcher."""


class Program(msgspec.Struct, frozen=True):
    """A program that the launcher runs."""

    argv: list[str]
    env: dict[str, str]
    """All environment variables of the program."""
    cwd: str
    limits: dict[str, int]
    """Resource limits: name of RLIMIT_… -> value."""
    log: Path
    """File for the output."""
    log_bytes: int
    grace: float
    """Seconds between SIGTERM and SIGKILL."""
    stdout: Path | None = None
    """File for the end of the standard output alone, which `log` has too. The program must not be able to write it."""
    stdout_bytes: int = 4 * 2**20
    """The most bytes of the file `stdout`: the last ones."""
    stdin: str | None = None
    """Text that the program reads from its standard input. None: it is closed."""
    is_isolated: bool = False
    """True if `argv` is the result of `isolated_program`."""


@dataclass(frozen=True)
class Exit:
    """The end of a program."""

    code: int | None
    """Exit code; a negative code is a signal. None if the program did not start, or the launcher was killed."""
    output: str
    """The last lines of its output."""
    error: str | None = None
    """Cause if the program did not start or its end is unknown."""
    launcher_was_killed: bool = False
    isolation_failed: bool = False
    """True if bubblewrap or its bridge failed: the fault is the infrastructure's. `error` has the cause."""
    stdout: str = ""
    """Content of the file `Program.stdout`."""
    exceeded: str = ""
    """The bound that an isolated program exceeded, for which it was ended: the fault is the program's."""


async def launch(program: Program) -> Exit:
    """Run a program to its end. A cancelled call ends the program and all of its descendants first."""
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
    reading = asyncio.ensure_future(launcher.stdout.read())
    _launchers[program.log] = launcher.pid
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            launcher.stdin.write(msgspec.json.encode(program, enc_hook=str) + b"\n")
            await launcher.stdin.drain()
        answer = await asyncio.shield(reading)
    finally:
        launcher.stdin.close()  # the launcher ends what still runs
        await _ended(launcher, reading, program.grace + _EXIT_SECONDS)
        _launchers.pop(program.log, None)
    output = await asyncio.to_thread(tail, program.log)
    stdout = "" if program.stdout is None else await asyncio.to_thread(_text, program.stdout)
    return dataclasses.replace(_exit(answer, output), stdout=stdout)


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


def _exit(answer: bytes, output: str) -> Exit:
    try:
        result = json.loads(answer.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return Exit(None, output, "the launcher of the program was killed", launcher_was_killed=True)
    if "error" in result:
        return Exit(None, output, result["error"], isolation_failed=result["isolation"])
    return Exit(result["code"], output, exceeded=result.get("exceeded", ""))


def launcher_of(log: Path) -> int | None:
    """Return the process id of the launcher whose program writes to `log`, None if the program does not run."""
    return _launchers.get(log)


def kill_marked(variable: str) -> int:
    """Kill every process whose environment has this NAME=VALUE, and return their number.

    This finds descendants of a program that killed its own launcher.
    """
    killed, mark = 0, variable.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
    return killed


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def tail(log: Path) -> str:
    """Return the last lines of a program's output, "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
