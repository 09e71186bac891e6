"""`RunIndex`: the index of one run, for a process that reads it while the run may go on.

The page's server and the commands ask it. Any thread may call it.
"""

from __future__ import annotations

from pathlib import Path

from verl_server.rollout.trajectory import Trajectory
from verl_server.watch.index.rows import (
    Activity,
    Episode,
    EpisodeFilter,
    EpisodePage,
    GroupRow,
    Lanes,
    Order,
    Progress,
    SearchPage,
    StepRow,
)
from verl_server.watch.run_records import TrainedTrajectory


class RunIndex:
    def __init__(self, path: Path) -> None:
        """`path` is the folder of a run, or a file of trajectories. Nothing is read before `start` or `poll`."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to index in a background thread, which follows a run that grows."""
        raise NotImplementedError

    def poll(self, seconds: float = 1.0) -> bool:
        """Index for about `seconds`, and return True if there is more to index. The background thread calls it."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread, and remove the temporary database."""
        raise NotImplementedError

    def progress(self) -> Progress:
        raise NotImplementedError

    def steps(self, *, lost: bool = False) -> list[StepRow]:
        """Return the steps in order, then the other places of the run."""
        raise NotImplementedError

    def groups(self, place: str, only: EpisodeFilter | None = None) -> list[GroupRow]:
        """Return the groups of a step (`StepRow.name`) that have an episode which fits, with all of their episodes."""
        raise NotImplementedError

    def group(self, row: str) -> GroupRow:
        """Return the group of an episode."""
        raise NotImplementedError

    def episodes(
        self, only: EpisodeFilter, *, order: Order = "newest", limit: int = 100, after: str | None = None
    ) -> EpisodePage:
        raise NotImplementedError

    def search(
        self, only: EpisodeFilter, text: str, *, cursor: str | None = None, seconds: float = 1.0, limit: int = 100
    ) -> SearchPage:
        """Search the texts of the episodes that fit, for about `seconds`: observations, actions, messages, errors and
        names of tools. ASCII letters match in both cases."""
        raise NotImplementedError

    def episode(self, row: str) -> Episode:
        """Return the episode that has a line. Raise RowUnknownError or RowGoneError."""
        raise NotImplementedError

    def trajectory(self, row: str) -> Trajectory:
        """Return a line. Raise RowUnknownError, RowGoneError, or BadRequestError if it is damaged."""
        raise NotImplementedError

    def trained(self, row: str) -> TrainedTrajectory | None:
        """Return what the trainer recorded about a line, None if nothing. Raise as `trajectory`."""
        raise NotImplementedError

    def span(self) -> tuple[float, float] | None:
        """Return the times of the first begin and of the last end of an episode, None if none is known."""
        raise NotImplementedError

    def lanes(self, begin: float, end: float, limit: int = 60) -> Lanes:
        """Return episodes that overlap a window of time, evenly chosen if they are more than `limit`."""
        raise NotImplementedError

    def activity(self, begin: float, end: float, points: int = 300) -> Activity:
        """Return what the episodes waited for over a window of time."""
        raise NotImplementedError
