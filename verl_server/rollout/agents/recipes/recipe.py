"""`Recipe`: how an installed program, such as Claude Code, plays an episode through a session.

The other modules of this folder have one `RECIPE` each. `--agent NAME` finds it by the name of its module. The runner
calls `start` for every episode, writes the files, runs the command inside the isolation, and reads the final answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ReadHome = Callable[[str], "str | None"]
"""Path below HOME -> text of the file there; None if there is none, or if it is no regular file or too large. The
program may have written anything there: a recipe opens no file itself."""


@dataclass(frozen=True)
class Place:
    """The paths, URLs and bounds that an episode offers to its program, as the program sees them."""

    program: str
    """Absolute path of the program."""
    prompt: str
    """The task: its input, then the first observation of its environment."""
    home: Path
    """HOME of the program. It is private and is removed after the episode."""
    workspace: Path
    """Working folder of the program, with the task's files. It is private to the episode."""
    openai_url: str = field(repr=False)
    """Base URL for OpenAI's wire, which contains the session key: it ends with /v1."""
    anthropic_url: str = field(repr=False)
    """Base URL for Anthropic's wire, which contains the session key."""
    key: str = field(repr=False)
    """The session key. It permits generation in the session of this episode only."""
    model: str
    """Name of the served model."""
    context: int
    """Most tokens of a prompt with its output."""
    max_output: int | None
    """Most tokens of one reply. None: the program's own bound."""
    max_turns: int | None
    """Most generations of the episode. None: no bound."""
    seconds: float
    """Time of the episode. A request may wait as long in the queue of a busy server: a client must not give up earlier
    and ask again."""


@dataclass(frozen=True)
class Start:
    """The command of one episode."""

    argv: Sequence[str]
    """The command. Words that the user wrote behind the recipe's name are appended to it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside PATH, HOME, TMPDIR and LANG. The program gets no others."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below HOME -> text of a file that is written before the program starts."""
    stdin: str | None = None
    """Text on the standard input. A prompt belongs here if the program reads it: as a word of the command, a prompt
    that begins with "-" would be an option, and a long one would not start."""


@dataclass(frozen=True)
class Recipe:
    """How a program is started for an episode, and what it answered."""

    program: str
    """Name of the program on PATH. `--program PATH` names another one."""
    install: str
    """Command that installs the program, for the error if it is missing."""
    versions: str
    """Versions that were run with this recipe."""
    start: Callable[[Place], Start]
    """Return the command of an episode."""
    answer: Callable[[str, ReadHome], str] = lambda stdout, read: stdout
    """Return the final answer from what the program wrote to stdout, and to files below HOME. It is called after the
    end of any program, also of one that failed: "" is no answer."""
    version: Sequence[str] = ("--version",)
    """Words with which the program prints its version. A program that has none may print anything, and exits with 0."""
    needs: Sequence[str] = ()
    """Further programs that it calls, such as "git"."""
    reserved: Sequence[str] = ()
    """Options that a user must not add, beside those of the command of `start`: other names of these ("--print" of
    "-p"), and options that would replace the address, the model, a limit or the answer. "-c KEY" is one key of an
    option with a value KEY=VALUE. A name without a dash is a variable that the user must not pass on, beside those of
    `start`."""
    takes_words: bool = True
    """False if the program ignores words behind its command, so that they are refused."""
    least_context: int = 0
    """Tokens of its first prompt, about. A server whose context is shorter cannot play any episode, and is refused."""
