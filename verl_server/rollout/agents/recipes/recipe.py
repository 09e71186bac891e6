"""`Recipe`: how an installed program, such as Claude Code, plays an episode through a session.

The other modules of this folder have one `RECIPE` each. `--agent NAME` finds it by the name of its module. The runner
calls `start` for every episode, writes the files, runs the command inside the isolation, and reads the final answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """What an episode offers to its program. The paths and URLs are those that the program sees."""

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


@dataclass(frozen=True)
class Start:
    """The command of one episode."""

    argv: Sequence[str]
    """The command. Words that the user wrote behind the recipe's name are appended to it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside PATH, HOME, TMPDIR and LANG. The program gets no others."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below HOME -> text of a file that is written before the program starts."""


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
    answer: Callable[[str, Path], str] = lambda stdout, home: stdout
    """Return the final answer from what the program wrote to stdout and below HOME."""
    needs: Sequence[str] = ()
    """Further programs that it calls, such as "git"."""
