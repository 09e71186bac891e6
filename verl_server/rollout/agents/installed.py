"""`InstalledAgent`: an installed program that plays episodes by a recipe, such as Claude Code.

`run_agents` takes it beside functions and commands; `loading.load_agent` makes it of `--agent NAME`. `check` finds what
is missing before the first episode. `play` runs the program for one episode, in a private home and a private workspace.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from verl_server.errors import BadRequestError
from verl_server.rollout.agents.program import ProgramExit, check_passed, passed_variables, probe_program, program_place
from verl_server.rollout.agents.prompts import task_prompt
from verl_server.rollout.agents.recipes.recipe import Place, Recipe, Start
from verl_server.rollout.agents.starting import ProgramStarts
from verl_server.rollout.agents.types import AgentLimits, AgentSession, AgentTask, Served
from verl_server.rollout.agents.words import check_words
from verl_server.rollout.environments.installation import installation_of
from verl_server.rollout.environments.isolation import Isolation, check_isolation
from verl_server.rollout.scratch import private_folder, remove_folder

logger = logging.getLogger(__name__)

INSTALLED_AT_ONCE = 16
"""Most episodes of an installed agent at one time, unless the caller sets another bound."""
_VERSION_CHARACTERS = 200
_STDOUT_BYTES = 4 * 2**20
"""The last bytes of the standard output from which an answer is read."""


@dataclass(frozen=True)
class ProgramOptions:
    """The options of command lines for agents that are programs."""

    program: str | None = None
    """Path of the program of a recipe (--agent NAME). Default: the one on PATH."""
    isolation: Isolation | None = None
    """`bubblewrap` runs an agent's program without your files, and with no network but its session; `none` lets it do
    all that you can. Default: bubblewrap for a recipe, none for a command. The checks of --environment workspace run in
    bubblewrap unless `none` is named here."""
    readable: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Folder that the program may read inside of bubblewrap, beside the system's and its own. May be repeated."""

    def __post_init__(self) -> None:
        if self.readable and self.isolation == "none":
            raise BadRequestError("--readable is for --isolation bubblewrap: without isolation, all is readable.")

    def installed(self, recipe: Recipe, name: str, words: Sequence[str]) -> InstalledAgent:
        """Return the agent of a recipe."""
        return InstalledAgent(recipe, name, self.program, words, self.isolation or "bubblewrap", self.folders)

    @property
    def folders(self) -> list[Path]:
        return [Path(folder) for folder in self.readable]

    def check_command(self) -> None:
        """Raise BadRequestError if an option is not for an agent that is a command."""
        if self.program is not None:
            raise BadRequestError("--program is for a recipe, and a command names its program itself: remove it.")
        if self.readable and self.isolation is None:
            raise BadRequestError("--readable needs --isolation bubblewrap: a command has no isolation by default.")

    def check_function(self) -> None:
        """Raise BadRequestError if an option is given, because the agent is a function of this process."""
        given = [f"--{name}" for name in ("program", "isolation", "readable") if getattr(self, name)]
        if given:
            raise BadRequestError(f"{given[0]} is for agents that are programs, and a function is none: remove it.")


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program that played by a recipe."""

    exit: ProgramExit
    answer: str
    """Its final answer, "" if there is none."""
    error: str | None = None
    """Why the recipe could not read the answer."""


@dataclass(frozen=True)
class InstalledAgent:
    """An installed program, and how it is run."""

    recipe: Recipe
    """How the program is started, and what it answered."""
    name: str
    """Name of the recipe, for messages and run.json."""
    program: str | None = None
    """Path of the program. None: the recipe's name on PATH."""
    words: Sequence[str] = ()
    """Words behind those of the recipe's command."""
    isolation: Isolation = "bubblewrap"
    """ "none" lets the program do all that this user can."""
    readable: Sequence[Path] = ()
    """Folders that the program may read inside the isolation, beside the system's and its own."""

    def check(self, pass_env: Sequence[str] = ()) -> None:
        """Raise BadRequestError, with the remedy, if the program cannot play an episode. Later calls cost nothing.

        `pass_env` names variables of this process that the program shall receive.
        """
        _ = self.version
        names = {name for name in self.recipe.reserved if not name.startswith("-")}
        check_passed(pass_env, names | self._trial.env.keys())

    @functools.cached_property
    def path(self) -> str:
        """Absolute path of the program. Raise BadRequestError if there is none."""
        wanted = self.program or self.recipe.program
        found = shutil.which(wanted)
        if found is None:
            where = f"at {wanted}" if self.program else f"{wanted!r} on PATH"
            raise BadRequestError(
                f"The recipe {self.name} needs a program, and there is none {where}. Install it "
                f"({self.recipe.install}), or name its path with --program PATH (program=)."
            )
        return os.path.abspath(found)

    @functools.cached_property
    def version(self) -> str:
        """The version that the program prints. Raise BadRequestError if the program cannot be run."""
        _ = self.path
        for needed in self.recipe.needs:
            if shutil.which(needed) is None:
                raise BadRequestError(f"The recipe {self.name} needs {needed!r}, which is not on PATH. Install it.")
        for folder in self.readable:
            if not Path(folder).is_dir():
                raise BadRequestError(f"--readable {folder} is no folder. Name folders that exist.")
        _ = self._trial
        check_isolation(self.isolation)
        if self.isolation == "none":
            _warn_of_no_isolation(self.name)
        try:
            said = probe_program(
                self.path,
                isolation=self.isolation,
                readable=[*self.readable, *self._needed],
                arguments=self.recipe.version,
            )
        except BadRequestError as error:
            raise BadRequestError(f"The program of the recipe {self.name} cannot be run: {error}") from None
        return said[:_VERSION_CHARACTERS]

    def check_served(self, served: Served) -> None:
        """Raise BadRequestError if the context of the served model is too short for the program's first prompt."""
        if served.context < self.recipe.least_context:
            raise BadRequestError(
                f"The recipe {self.name} needs a context of {self.recipe.least_context} tokens, because its own "
                f"instructions fill most of it, and {served.model} has {served.context}. Serve a model with a longer "
                "context, or a larger KV cache."
            )

    def __str__(self) -> str:
        """Name the recipe, its program and its isolation in one line, for people."""
        isolation = "without isolation" if self.isolation == "none" else f"in {self.isolation}"
        return f"recipe {self.name}, {self.version} ({self.path}), {isolation}"

    def described(self) -> dict[str, Any]:
        """Return the settings of a run that say how the program is run, for run.json."""
        return {
            "agent": [self.name, *self.words],
            "isolation": self.isolation,
            "readable": [str(Path(folder).resolve()) for folder in self.readable],
            "program": self.path,
            "program_version": self.version,
        }

    async def play(
        self,
        session: AgentSession,
        task: AgentTask,
        *,
        served: Served,
        limits: AgentLimits,
        max_output: int | None,
        workspace: Path | None,
        log: Path,
        pass_env: Sequence[str] = (),
        starts: ProgramStarts | None = None,
    ) -> ProgramEnd:
        """Run the program to its end. A cancelled call ends the program and all of its descendants first.

        `workspace` is the folder in which it works; None: an empty one, which is removed. `starts` is that of
        `program_place`.
        """
        async with contextlib.AsyncExitStack() as stack:
            if workspace is None:
                workspace = private_folder("workspace")
                stack.push_async_callback(asyncio.to_thread, remove_folder, workspace)
            offered = await stack.enter_async_context(
                program_place(
                    session,
                    isolation=self.isolation,
                    readable=self.readable,
                    workspace=workspace,
                    restart_timeout=limits.restart_timeout,
                    starts=starts,
                )
            )
            context = served.context if limits.max_context is None else min(served.context, limits.max_context)
            start = self.recipe.start(
                Place(
                    program=self.path,
                    prompt=task_prompt(task, session.environment),
                    home=offered.home,
                    workspace=offered.cwd,
                    openai_url=offered.openai_url,
                    anthropic_url=offered.anthropic_url,
                    key=offered.key,
                    model=served.model,
                    context=context,
                    max_output=max_output,
                    max_turns=limits.max_turns,
                    seconds=limits.seconds,
                )
            )
            await asyncio.to_thread(offered.write, start.files)
            exit = await offered.run(
                [*start.argv, *self.words],
                passed_variables(pass_env) | dict(start.env),
                limits=limits,
                log=log,
                stdin=start.stdin,
                readable=self._needed,
                stdout_bytes=_STDOUT_BYTES,
            )
            if exit.code is None and not exit.launcher_was_killed:  # it did not start, and it did when it was checked
                exit = dataclasses.replace(exit, isolation_failed=True)
            try:
                return ProgramEnd(exit, await asyncio.to_thread(self.recipe.answer, exit.stdout, offered.read))
            except Exception as error:  # the program chose what there is to read
                return ProgramEnd(exit, "", f"The recipe read no answer: {type(error).__name__}: {error}")

    @functools.cached_property
    def _needed(self) -> list[Path]:
        """The files and folders of the programs that the program calls, for the isolation."""
        if self.isolation == "none":
            return []
        programs = [Path(found) for name in self.recipe.needs if (found := shutil.which(name)) is not None]
        return [path for program in programs for path in installation_of(program)]

    @functools.cached_property
    def _trial(self) -> Start:
        """A command that is not run. Raise BadRequestError if the recipe or the words of the user are wrong."""
        place = Place(
            program=self.path,
            prompt="Hello.",
            home=Path("/home"),
            workspace=Path("/workspace"),
            openai_url="http://127.0.0.1/s/key/v1",
            anthropic_url="http://127.0.0.1/s/key",
            key="key",
            model="model",
            context=4096,
            max_output=100,
            max_turns=100,
            seconds=60.0,
        )
        try:
            start = self.recipe.start(place)
            pairs = [*start.env.items(), *start.files.items()]
            words = [*start.argv, start.stdin or "", *(part for pair in pairs for part in pair)]
        except Exception as error:
            raise BadRequestError(f"The recipe {self.name} failed: {type(error).__name__}: {error}") from error
        if not start.argv or not all(isinstance(word, str) for word in words):
            raise BadRequestError(f"The recipe {self.name} must return a command, variables and files of texts.")
        if not Path(start.argv[0]).is_absolute():
            raise BadRequestError(f"The recipe {self.name} must start place.program, not {start.argv[0]!r}.")
        if self.words and not self.recipe.takes_words:
            raise BadRequestError(f"The program of the recipe {self.name} has no options: leave {self.words[0]!r} out.")
        check_words(self.name, self.words, start.argv, self.recipe.reserved)
        outside = [name for name in start.files if Path(name).is_absolute() or ".." in Path(name).parts]
        if outside:
            raise BadRequestError(f"The recipe {self.name} names a file outside of HOME: {outside[0]!r}.")
        return start


@functools.cache
def _warn_of_no_isolation(name: str) -> None:
    logger.warning(
        "The program of %s runs without isolation: it can read, change and send all that this user can. "
        "--isolation bubblewrap keeps it apart.",
        name,
    )
