"""An agent that is a program: a subprocess whose environment variables are set explicitly. `episode.py` starts it.

The program gets the base URL and the key of its own session, never the owner's key. `rollout.launched` limits its
resources, captures its output and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.rollout.agents.types import AgentLimits, AgentSession, AgentTask
from verl_server.rollout.launched import Exit, Program, kill_marked, launch

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_RESERVED = ("VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY")


def check_program(argv: Sequence[str], pass_env: Sequence[str] = ()) -> list[str]:
    """Return the command with the path of its program. Raise BadRequestError if there is none."""
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
        program = Program(
            argv=list(argv),
            cwd=os.getcwd(),
            env=_environment(session, folder, task_file, environment_url, pass_env),
            limits=_resource_limits(limits),
            log=log,
            log_bytes=limits.log_bytes,
            grace=limits.kill_grace,
        )
        exit = await launch(program)
        if exit.launcher_was_killed:
            await asyncio.to_thread(kill_marked, f"OPENAI_API_KEY={session.api_key}")
        return exit
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _environment(
    session: AgentSession, folder: Path, task_file: Path, environment_url: str | None, pass_env: Sequence[str]
) -> dict[str, str]:
    """Return the environment variables of the program, which inherits none."""
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


@contextlib.contextmanager
def memory_hidden() -> Iterator[None]:
    """Keep other processes of this user from reading this process's memory and environment (Linux)."""
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
