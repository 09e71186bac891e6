"""What trackers know of a training run, and what each of them offers: `TrackedRun`, `Tracker`, `Earlier`.

`Trackers` sends a `TrackedRun` to the process of the trackers, which opens each tracker with it. `EarlierRuns` is the
file trackers.json in the run's folder: with it, a resumed run continues its runs in the trackers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from verl_server.files.durable import write_file
from verl_server.files.json_files import decode_json, read_bytes

PROJECT = "verl-server"
"""Name of the project (wandb, trackio) or the experiment (mlflow), unless a variable of the package names another."""

Kind = Literal["step", "evaluation"]


class Figures(msgspec.Struct, tag=True):
    """Figures at one step."""

    kind: Kind
    step: int
    figures: dict[str, float]


class RunIsOver(msgspec.Struct, tag=True):
    """The run has ended with this exit status."""

    exit_status: int


class Earlier(msgspec.Struct):
    """What a tracker has of the run."""

    run: str
    """The tracker's id of the run."""
    last: dict[str, int] = {}
    """Kind of figures -> the last step that the tracker has."""


class TrackedRun(msgspec.Struct):
    """A start of a training run."""

    folder: str
    settings: dict[str, Any]
    next_step: int
    """The first step of this start."""
    is_resumed: bool
    earlier: dict[str, Earlier] = {}
    """Tracker -> what it has of the run, if the run is resumed."""

    @property
    def name(self) -> str:
        """Name of the run in trackers: that of its folder."""
        return Path(self.folder).resolve().name

    def run_in(self, tracker: str) -> str | None:
        """Return the tracker's id of this run, if an earlier start opened it there."""
        return self.earlier[tracker].run if tracker in self.earlier else None


class Tracker(Protocol):
    """A run that is open in a tracker. One thread opens and calls it."""

    run_id: str | None
    """The tracker's id of the run. None if the tracker itself replaces steps that run again."""

    def log(self, figures: Figures) -> None:
        """Write the figures of a step or an evaluation. Any exception leaves the tracker out from then on."""

    def close(self, exit_status: int) -> None:
        """Write what is left. The run has ended with this exit status."""


class EarlierRuns:
    """The file trackers.json of a run's folder. The threads of all trackers call it."""

    def __init__(self, run: TrackedRun) -> None:
        """Read the file into `run.earlier` if the run is resumed. A new run replaces it."""
        self._path = Path(run.folder) / "trackers.json"
        self._lock = threading.Lock()
        if run.is_resumed and self._path.exists():
            run.earlier = decode_json(read_bytes(self._path), dict[str, Earlier], str(self._path))
        self._runs = dict(run.earlier)

    def store(self, tracker: str, earlier: Earlier) -> None:
        with self._lock:
            self._runs[tracker] = earlier
            write_file(self._path, msgspec.json.format(msgspec.json.encode(self._runs), indent=2) + b"\n")


def exit_kind(exit_status: int) -> Literal["complete", "failed", "stopped"]:
    """Return the end of a run that trackers distinguish. It was stopped if a signal ended it."""
    if exit_status == 0:
        return "complete"
    return "stopped" if exit_status > 128 else "failed"


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are not None as texts, for trackers that store no other values."""
    return {name: str(value) for name, value in settings.items() if value is not None}
