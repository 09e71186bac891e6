"""`RunTail`: metrics, events and state of one run, for a process that follows the run's folder while it may grow.

The page's server asks it, from any thread. `poll` reads what was appended since the last call and nothing else.
Metrics are kept as columns of numbers, and of an event only its place in the file, so that a run of 100,000 steps takes
some ten megabytes. Nothing in the folder is changed, and no lock is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_server.watch.run_files import Lineage
from verl_server.watch.run_records import AnyEvent

RunState = Literal["running", "ended", "failed", "unknown"]
"""running: a process holds the run. failed: the run ended with an error. unknown: there is neither a process of this
machine that holds the run nor an end of it: it was killed, or it runs on another machine."""


class StepTimes(msgspec.Struct, kw_only=True):
    """When a step ran. Times are wall times in seconds since 1970."""

    step: int
    incarnation: str
    began: float
    ended: float | None
    """None: the step runs, or the run ended in it."""
    phases: dict[str, float]
    """Phase -> seconds, in the order of the phases. {} before the end."""
    is_lost: bool
    """True if a resumed run ran the step again."""


class RunTail:
    def __init__(self, path: Path) -> None:
        """`path` is the folder of a run, or a file of trajectories. Nothing is read before `poll`."""
        self.generation = 0
        """Grows when a call of `poll` found something new."""
        self.settings: dict[str, Any] = {}
        """The settings that the run stored; {} if there are none."""
        self.state: RunState = "unknown"
        self.exit_status: int | None = None
        """Exit status of a run that has ended."""
        self.error: str | None = None
        """The error that ended the run."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Read what is new. Return True if something was. A fault of a file becomes a warning, never an exception."""
        raise NotImplementedError

    @property
    def lineage(self) -> Lineage:
        """The starts of the run."""
        raise NotImplementedError

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of metrics and events that were read, and bytes of the files."""
        raise NotImplementedError

    @property
    def damaged(self) -> int:
        """Number of lines that could not be read."""
        raise NotImplementedError

    @property
    def warnings(self) -> list[str]:
        """The first faults of the files, each with its file."""
        raise NotImplementedError

    @property
    def started(self) -> float | None:
        """Wall time of the first line."""
        raise NotImplementedError

    @property
    def last(self) -> float | None:
        """Wall time of the last line."""
        raise NotImplementedError

    def steps(self, *, lost: bool = False) -> list[int]:
        """Return the steps that have metrics, in their order."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the names of the figures that some line has, in the order in which they appeared."""
        raise NotImplementedError

    def metrics(
        self,
        names: Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
        *,
        lost: bool = False,
    ) -> dict[str, list[Any]]:
        """Return columns of one length: step, time and the figures `names` of the steps `first` to `last`, included.

        A figure in a dict has a name like "losses.kl". None stands for a line without the figure, NaN for a figure that
        was not finite. Without `lost`, steps that a resumed run ran again are left out. An unknown name is a column of
        None.
        """
        raise NotImplementedError

    def line(self, step: int) -> dict[str, Any] | None:
        """Return the whole line of metrics of a step, or None if there is none."""
        raise NotImplementedError

    def events(
        self, kinds: Collection[str] | None = None, after: int = 0, limit: int = 1000, *, newest: bool = False
    ) -> list[tuple[int, AnyEvent]]:
        """Return (number, event) of at most `limit` events with a number above `after`, of some kinds or of all.

        Numbers begin at 1, and stay. With `newest`, return the last ones, still in the order of their numbers.
        """
        raise NotImplementedError

    def times(self, first: int | None = None, last: int | None = None, *, lost: bool = False) -> list[StepTimes]:
        """Return when the steps `first` to `last`, included, ran."""
        raise NotImplementedError

    def steps_between(self, begin: float, end: float, limit: int = 1000) -> list[StepTimes]:
        """Return the steps that ran in a window of time, lost ones too, evenly chosen if they exceed `limit`."""
        raise NotImplementedError

    def phases(self, step: int) -> dict[str, float]:
        """Return phase -> seconds of a step that has ended, else {}."""
        raise NotImplementedError
