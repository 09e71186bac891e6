"""An agent that is a program: a subprocess whose environment variables are set explicitly. `episode.py` starts it.

The program gets the base URL and the key of its own session, never the owner's key. `rollout.launched` limits its
resources, captures its output and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.trees import read_below
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.rollout.agents.starting import ProgramStarts
from verl_server.rollout.agents.types import AgentLimits, AgentSession, AgentTask
from verl_server.rollout.agents.uplink import ENVIRONMENT_REQUESTS, SESSION_REQUESTS, Traffic, uplink
from verl_server.rollout.disk_bound import launch_within
from verl_server.rollout.environments.installation import installation_of, visible_path
from verl_server.rollout.environments.isolation import Isolation, check_isolation, isolated_program
from verl_server.rollout.launched import Exit, Program, kill_marked
from verl_server.rollout.scratch import private_folder, remove_folder

_SESSION_PORT, _ENVIRONMENT_PORT = 30000, 30001
"""Ports of the sandbox's own network."""
_HOME, _WORKSPACE = Path("/home/agent"), Path("/workspace")
_NO_KEY = "session"
"""The key that an isolated program sends. The same prompts in all episodes of a group share a prefix of the cache."""
_TASK_FILE = "task.json"
_MOST_PROCESSES = 4096
"""Processes and threads of a sandbox if `AgentLimits.processes` is None, so that a fork bomb has a bound."""
_OWN = (
    *("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
    *("VERL_TASK_FILE", "VERL_ENVIRONMENT_URL"),
)
"""Variables of a command, beside HOME and TMPDIR, that `run_program` sets."""
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
    check_passed(pass_env, _OWN)
    found = shutil.which(argv[0])
    if found is None:
        raise BadRequestError(f"There is no program {argv[0]!r} on PATH or at this path (folder {os.getcwd()}).")
    command = [os.path.abspath(found), *argv[1:]]
    check_isolation(isolation)
    if isolation != "none":
        isolated_program(command, cwd=Path("/tmp"), readable=[*readable, *installation_of(Path(command[0]))])
    return command


def probe_program(
    program: str, *, isolation: Isolation, readable: Sequence[Path] = (), arguments: Sequence[str] = ("--version",)
) -> str:
    """Run a program once, isolated as in the episodes, and return its first line. This blocks for some seconds.

    Raise BadRequestError with the end of its output if it cannot run: its interpreter or a library may be missing.
    """
    command, home, shown_command = [program, *arguments], Path("/tmp"), " ".join([program, *arguments])
    path = os.environ.get("PATH", os.defpath)
    if isolation != "none":
        check_isolation(isolation)
        shown = [*readable, *installation_of(Path(program))]
        command, path = isolated_program(command, cwd=home, readable=shown), visible_path(path, shown)
    env = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=env, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise BadRequestError(f"`{shown_command}` did not end within 60 s.") from None
    except OSError as error:
        raise BadRequestError(f"{program} does not start: {error}") from error
    if done.returncode != 0:
        raise BadRequestError(
            f"`{shown_command}` failed (exit code {done.returncode}) with isolation {isolation!r}. A file that the "
            "program needs may not be visible: name its folder with `readable` (--readable FOLDER), or use "
            f"--isolation none. Its last lines:\n{(done.stdout + done.stderr)[-1000:]}"
        )
    return (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]


def check_passed(pass_env: Sequence[str], own: Collection[str] = ()) -> None:
    """Raise BadRequestError if a program would receive the owner's key, or if the runner sets a variable itself.

    `own` are further variables that each episode sets, beside HOME and TMPDIR.
    """
    for name in pass_env:
        if name in _RESERVED:
            raise BadRequestError(f"pass_env must not name {name}: no agent receives the owner's key.")
        if name in own or name in ("HOME", "TMPDIR"):
            raise BadRequestError(
                f"pass_env (--pass-env) must not name {name}: each episode has its own. Leave it out."
            )


def passed_variables(pass_env: Sequence[str]) -> dict[str, str]:
    """Return the variables of this process that a program receives beside its own."""
    return {name: os.environ[name] for name in pass_env if name in os.environ}


class PlaceError(VerlServerError):
    """The place of a program was not made: the disk or the descriptors are used up. The program is not at fault."""

    status_code = 500


@dataclass(frozen=True)
class ProgramExit(Exit):
    """The end of an agent that is a program."""

    traffic: Traffic | None = None
    """The requests of the program to its session. None: the program was not isolated, so the runner saw none."""


@dataclass(frozen=True)
class ProgramPlace:
    """The paths, URLs and key that one episode offers to its program, as the program sees them."""

    home: Path
    """HOME. It is private and is removed at the end."""
    temporary: Path
    """TMPDIR, which is private, too."""
    cwd: Path
    """Working folder: the workspace if the episode has one, else the runner's, which an isolated program only reads."""
    openai_url: str = field(repr=False)
    """Base URL for OpenAI's clients."""
    anthropic_url: str = field(repr=False)
    """Base URL for Anthropic's clients."""
    key: str = field(repr=False)
    """The session key. Isolated programs have a word in its place, and the uplink knows the key."""
    environment_url: str | None = field(repr=False)
    """URL of the environment, None without one."""
    traffic: Traffic | None
    """The requests of the program to its session so far. None: the program is not isolated."""
    folder: Path
    """Private folder of the episode outside of the sandbox. Its `home` is HOME."""
    sandbox: Mapping[str, Any] | None
    """Arguments of `isolated_program`, None without isolation."""
    workspace: Path | None
    """The workspace outside of the sandbox. None: there is none, and the program works in the runner's folder."""
    starts: ProgramStarts
    """The bound of isolated programs that start at one time."""

    def write(self, files: Mapping[str, str]) -> None:
        """Write files before the program starts: path below HOME -> text."""
        for name, text in files.items():
            path = self.folder / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def read(self, name: str, most: int = 4 * 2**20) -> str | None:
        """Return the text of a file below HOME after the program's end.

        None if there is no such file, if it has more than `most` bytes, or if the program put a link or a pipe there.
        """
        data = read_below(self.folder / "home", name, most)
        return None if data is None else data.decode(errors="replace")

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        limits: AgentLimits,
        log: Path,
        stdin: str | None = None,
        readable: Sequence[Path] = (),
        stdout_bytes: int | None = None,
    ) -> ProgramExit:
        """Run a program to its end. A cancelled call ends the program and all of its descendants first.

        `env` are its variables beside HOME, TMPDIR, LANG, TZ and PATH. `readable` are files that it may read, beside
        its installation, which `installation_of` finds. `stdin` is its input. With `stdout_bytes`, `stdout` of the
        result has the last so many bytes of its standard output. `isolation_failed` is True if the sandbox failed.
        """
        bounds = _resource_limits(limits, None if self.sandbox is None else _MOST_PROCESSES)
        variables = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "LANG": "C.UTF-8", **env}
        variables.setdefault("PATH", os.environ.get("PATH", os.defpath))
        cwd = str(self.cwd)
        if self.sandbox is not None:
            try:
                argv, path = await asyncio.to_thread(self._isolated, argv, variables["PATH"], readable, bounds)
            except BadRequestError as error:
                return ProgramExit(None, "", str(error), isolation_failed=True, traffic=self.traffic)
            variables |= {"PATH": path, "TZ": variables.get("TZ", "UTC")}
            bounds, cwd = {}, "/"
        program = Program(
            argv=list(argv),
            cwd=cwd,
            env=variables,
            limits=bounds,
            log=log,
            log_bytes=limits.log_bytes,
            grace=limits.kill_grace,
            stdin=stdin,
            stdout=None if stdout_bytes is None else self.folder / "stdout",
            stdout_bytes=stdout_bytes or 0,
            is_isolated=self.sandbox is not None,
        )
        async with contextlib.nullcontext() if self.traffic is None else self.starts.start(self.traffic):
            exit = await launch_within(program, self._written, limits.disk_bytes, "AgentLimits.disk_bytes")
        if exit.launcher_was_killed and self.sandbox is None:  # a sandbox ends with its launcher
            await asyncio.to_thread(kill_marked, f"HOME={self.home}")
        return ProgramExit(**vars(exit), traffic=self.traffic)

    @property
    def _written(self) -> list[Path]:
        """The private folders that the program fills, on the disk."""
        return [self.folder, *([] if self.workspace is None else [self.workspace])]

    def _isolated(
        self, argv: Sequence[str], path: str, readable: Sequence[Path], limits: Mapping[str, int]
    ) -> tuple[list[str], str]:
        """Return (command, PATH) of the isolated program."""
        assert self.sandbox is not None
        shown = [*self.sandbox["readable"], *readable, *installation_of(Path(argv[0]))]
        settings = {**self.sandbox, "readable": shown}
        return isolated_program(argv, cwd=self.cwd, limits=limits, **settings), visible_path(path, shown)


@contextlib.asynccontextmanager
async def program_place(
    session: AgentSession,
    *,
    environment_url: str | None = None,
    isolation: Isolation = "none",
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    workspace: Path | None = None,
    restart_timeout: float = 300.0,
    starts: ProgramStarts | None = None,
) -> AsyncIterator[ProgramPlace]:
    """Yield the place of one episode's program, and remove it at the end.

    With `isolation="bubblewrap"`, the program reaches its session and its environment only, over addresses of its own
    sandbox, and its paths are the same in all episodes. `readable` are further files and folders that it may read, and
    `hidden` parts of them that it must not see. `workspace` is its working folder, to which it may write.
    `restart_timeout` bounds the wait for a server that is away. `starts` has the isolated programs of other episodes
    that start now; None: there are no others. Raise PlaceError.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            folder = private_folder("agent").resolve()
            stack.push_async_callback(asyncio.to_thread, remove_folder, folder)
            for name in ("home", "tmp", "sockets"):
                (folder / name).mkdir(mode=0o700)
            if isolation == "none":
                place = _open_place(folder, session, environment_url, workspace, starts or ProgramStarts())
            else:
                raise_descriptor_limit()
                sockets = {_SESSION_PORT: folder / "sockets" / "session"}
                link = uplink(sockets[_SESSION_PORT], session.anthropic_base_url, SESSION_REQUESTS, restart_timeout)
                traffic = await stack.enter_async_context(link)
                if environment_url is not None:
                    sockets[_ENVIRONMENT_PORT] = folder / "sockets" / "environment"
                    link = uplink(sockets[_ENVIRONMENT_PORT], environment_url, ENVIRONMENT_REQUESTS, 0.0)
                    await stack.enter_async_context(link)
                sandbox = {"readable": readable, "hidden": hidden, "sockets": sockets}
                place = _isolated_place(folder, traffic, sandbox, workspace, starts or ProgramStarts())
        except OSError as error:
            raise PlaceError(f"The place of an episode's program was not made: {error}") from error
        yield place


def _open_place(
    folder: Path, session: AgentSession, environment_url: str | None, workspace: Path | None, starts: ProgramStarts
) -> ProgramPlace:
    return ProgramPlace(
        home=folder / "home",
        temporary=folder / "tmp",
        cwd=Path.cwd() if workspace is None else workspace.resolve(),
        openai_url=session.base_url,
        anthropic_url=session.anthropic_base_url,
        key=session.api_key,
        environment_url=environment_url,
        traffic=None,
        folder=folder,
        sandbox=None,
        workspace=workspace,
        starts=starts,
    )


def _isolated_place(
    folder: Path, traffic: Traffic, sandbox: Mapping[str, Any], workspace: Path | None, starts: ProgramStarts
) -> ProgramPlace:
    """Return the place with the paths and addresses that are the same in the sandbox of every episode."""
    writable_at, readable = {_HOME: folder / "home"}, sandbox["readable"]
    cwd = Path.cwd()
    if workspace is None:
        readable = [*readable, cwd]
    else:
        cwd, writable_at[_WORKSPACE] = _WORKSPACE, workspace.resolve()
    url, sockets = f"http://127.0.0.1:{_SESSION_PORT}", sandbox["sockets"]
    return ProgramPlace(
        home=_HOME,
        temporary=Path("/tmp"),
        cwd=cwd,
        openai_url=f"{url}/v1",
        anthropic_url=url,
        key=_NO_KEY,
        environment_url=f"http://127.0.0.1:{_ENVIRONMENT_PORT}" if _ENVIRONMENT_PORT in sockets else None,
        traffic=traffic,
        folder=folder,
        sandbox={**sandbox, "readable": readable, "writable_at": writable_at, "readable_at": {}},
        workspace=workspace,
        starts=starts,
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
    starts: ProgramStarts | None = None,
) -> ProgramExit:
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
        restart_timeout=limits.restart_timeout,
        starts=starts,
    ) as place:
        tools = session.environment.tools if session.environment is not None else []
        task_file = {"input": task.input, "seed": task.seed, "tools": tools, **(about or {})}
        place.write({_TASK_FILE: msgspec.json.encode(task_file).decode()})
        return await place.run(argv, _variables(place, pass_env), limits=limits, log=log)


def _variables(place: ProgramPlace, pass_env: Sequence[str]) -> dict[str, str]:
    """Return the variables of the program beside those of `ProgramPlace.run`. It inherits none."""
    env = passed_variables(pass_env)
    env |= {
        "OPENAI_BASE_URL": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "ANTHROPIC_BASE_URL": place.anthropic_url,
        "ANTHROPIC_API_KEY": place.key,
        "VERL_TASK_FILE": str(place.home / _TASK_FILE),
    }
    if place.environment_url is not None:
        env["VERL_ENVIRONMENT_URL"] = place.environment_url
    return env


def _resource_limits(limits: AgentLimits, processes: int | None = None) -> dict[str, int]:
    """Return name of RLIMIT_… -> value. `processes` is the bound of processes if `limits` has none."""
    wanted = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.processes or processes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
    }
    return {name: value for name, value in wanted.items() if value is not None}
