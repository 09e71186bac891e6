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
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.rollout.agents.types import AgentLimits, AgentSession, AgentTask
from verl_server.rollout.agents.uplink import uplink
from verl_server.rollout.environments.installation import installation_of, visible_path
from verl_server.rollout.environments.isolation import Isolation, check_isolation, isolated_program
from verl_server.rollout.launched import Exit, Program, kill_marked, launch
from verl_server.rollout.left_files import remove_left

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_SESSION_PORT, _ENVIRONMENT_PORT = 30000, 30001
"""Ports of the sandbox's own network."""
_RESERVED = ("VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY")


def check_program(
    argv: Sequence[str],
    pass_env: Sequence[str] = (),
    *,
    isolation: Isolation = "none",
    readable: Sequence[Path] = (),
) -> list[str]:
    """Return the command with the path of its program.

    Raise BadRequestError if there is none, or if it cannot be isolated as requested.
    """
    if not argv:
        raise BadRequestError("The agent's command is empty: pass a list such as ['python', 'my_agent.py'].")
    refused = [name for name in pass_env if name in _RESERVED]
    if refused:
        raise BadRequestError(f"pass_env must not name {refused[0]}: no agent receives the owner's key.")
    found = shutil.which(argv[0])
    if found is None:
        raise BadRequestError(f"There is no program {argv[0]!r} on PATH or at this path (folder {os.getcwd()}).")
    command = [os.path.abspath(found), *argv[1:]]
    check_isolation(isolation)
    if isolation != "none":
        isolated_program(command, cwd=Path("/tmp"), readable=[*readable, *installation_of(Path(command[0]))])
    return command


class PlaceError(VerlServerError):
    """The place of a program was not made: the disk or the descriptors are used up. The program is not at fault."""

    status_code = 500


@dataclass(frozen=True)
class ProgramPlace:
    """What one episode offers to its program. Paths and URLs are those that the program sees. `run` starts it."""

    home: Path
    """HOME. It is private and is removed at the end."""
    temporary: Path
    """TMPDIR, which is private, too."""
    cwd: Path
    """Working folder: the workspace if the episode has one, else the runner's, which an isolated program only reads."""
    openai_url: str
    """Base URL for OpenAI's clients."""
    anthropic_url: str
    """Base URL for Anthropic's clients."""
    key: str = field(repr=False)
    """The session key."""
    environment_url: str | None
    """URL of the environment, None without one."""
    isolation: Isolation
    sockets: Mapping[int, Path]
    """Port of the sandbox -> Unix socket of an uplink."""
    readable: Sequence[Path]
    writable: Sequence[Path]
    hidden: Sequence[Path]

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        limits: AgentLimits,
        log: Path,
        readable: Sequence[Path] = (),
        stdout_bytes: int | None = None,
    ) -> Exit:
        """Run a program to its end. A cancelled call ends the program and all of its descendants first.

        `env` are its variables beside PATH, HOME, TMPDIR and LANG. `readable` are files that it may read, beside its
        installation, which `installation_of` finds. With `stdout_bytes`, `Exit.stdout` has that much of its standard
        output. `Exit.isolation_failed` is True if the sandbox failed, not the program.
        """
        bounds = _resource_limits(limits)
        variables = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "LANG": "C.UTF-8", **env}
        variables.setdefault("PATH", os.environ.get("PATH", os.defpath))
        if self.isolation == "bubblewrap":
            try:
                argv, path = await asyncio.to_thread(self._isolated, argv, variables["PATH"], readable, bounds)
            except BadRequestError as error:
                return Exit(None, "", str(error), isolation_failed=True)
            variables["PATH"], bounds = path, {}
        program = Program(
            argv=list(argv),
            cwd=str(self.cwd) if self.isolation == "none" else "/",
            env=variables,
            limits=bounds,
            log=log,
            log_bytes=limits.log_bytes,
            grace=limits.kill_grace,
            stdout=None if stdout_bytes is None else self.home.with_name("stdout"),
            stdout_bytes=stdout_bytes or 0,
            is_isolated=self.isolation == "bubblewrap",
        )
        exit = await launch(program)
        if exit.launcher_was_killed:
            await asyncio.to_thread(kill_marked, f"HOME={self.home}")
        return exit

    def _isolated(
        self, argv: Sequence[str], path: str, readable: Sequence[Path], limits: Mapping[str, int]
    ) -> tuple[list[str], str]:
        """Return (command, PATH) of the isolated program."""
        shown = [*self.readable, *readable, *installation_of(Path(argv[0]))]
        command = isolated_program(
            argv,
            cwd=self.cwd,
            readable=shown,
            writable=self.writable,
            hidden=self.hidden,
            sockets=self.sockets,
            limits=limits,
        )
        return command, visible_path(path, shown)


@contextlib.asynccontextmanager
async def program_place(
    session: AgentSession,
    *,
    environment_url: str | None = None,
    isolation: Isolation = "none",
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    workspace: Path | None = None,
) -> AsyncIterator[ProgramPlace]:
    """Yield the place of one episode's program, and remove it at the end.

    With `isolation="bubblewrap"`, the program reaches its session and its environment only, over addresses of its own
    sandbox. `readable` are further files and folders that it may read, and `hidden` parts of them that it must not see.
    `workspace` is its working folder, to which it may write. Raise PlaceError.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="verl-agent-")).resolve()
    except OSError as error:
        raise PlaceError(f"The folder of an episode was not made: {error}") from error
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, remove_left, folder)
        sockets: dict[int, Path] = {}

        async def inner(url: str, port: int) -> str:
            """Return the URL inside the sandbox for a URL outside."""
            if isolation == "none":
                return url
            sockets[port] = folder / "sockets" / str(port)
            await stack.enter_async_context(uplink(sockets[port], url))
            return f"http://127.0.0.1:{port}{urlsplit(url).path}"

        try:
            for name in ("home", "tmp", "sockets"):
                (folder / name).mkdir(mode=0o700)
            if isolation != "none":
                raise_descriptor_limit()
            anthropic_url = await inner(session.anthropic_base_url, _SESSION_PORT)
            below = session.base_url.removeprefix(session.anthropic_base_url)
            environment = None if environment_url is None else await inner(environment_url, _ENVIRONMENT_PORT)
        except OSError as error:
            raise PlaceError(f"The place of an episode's program was not made: {error}") from error
        cwd = workspace.resolve() if workspace is not None else Path.cwd()
        private = [folder / "home", folder / "tmp"]
        yield ProgramPlace(
            home=private[0],
            temporary=private[1],
            cwd=cwd,
            openai_url=anthropic_url + below,
            anthropic_url=anthropic_url,
            key=session.api_key,
            environment_url=environment,
            isolation=isolation,
            sockets=sockets,
            readable=[*readable, *([cwd] if workspace is None else [])],
            writable=[*private, *([cwd] if workspace is not None else [])],
            hidden=hidden,
        )


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
    isolation: Isolation = "none",
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    workspace: Path | None = None,
) -> Exit:
    """Run the program to its end. A cancelled call ends the program and all of its descendants first.

    `about` is added to the task file, which has `input`, `seed` and the tools of the environment. The other arguments
    are those of `program_place`. Raise PlaceError.
    """
    async with program_place(
        session,
        environment_url=environment_url,
        isolation=isolation,
        readable=readable,
        hidden=hidden,
        workspace=workspace,
    ) as place:
        task_file = place.home.with_name("task.json")
        tools = session.environment.tools if session.environment is not None else []
        task_file.write_bytes(
            msgspec.json.encode({"input": task.input, "seed": task.seed, "tools": tools, **(about or {})})
        )
        env = _variables(place, task_file, pass_env)
        return await place.run(argv, env, limits=limits, log=log, readable=[task_file])


def _variables(place: ProgramPlace, task_file: Path, pass_env: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of the program, which inherits none."""
    env = {name: os.environ[name] for name in pass_env if name in os.environ}
    env |= {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(place.home),
        "TMPDIR": str(place.temporary),
        "LANG": "C.UTF-8",
        "OPENAI_BASE_URL": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "ANTHROPIC_BASE_URL": place.anthropic_url,
        "ANTHROPIC_API_KEY": place.key,
        "VERL_TASK_FILE": str(task_file),
    }
    if place.environment_url is not None:
        env["VERL_ENVIRONMENT_URL"] = place.environment_url
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
