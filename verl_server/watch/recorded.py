"""`read_recorded`: the trajectories that a command recorded, with step and rank if a training run wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import decode_json, numbered_lines
from verl_server.rollout.trajectory import Trajectory, rank_files, read_trajectory


class _Label(msgspec.Struct):
    """The keys that a training run writes before the fields of a trajectory."""

    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Recorded:
    trajectory: Trajectory
    step: int | None
    """Step of a training run, None in another run."""
    rank: int | None
    """Rank that played the episode, None in another run."""

    @property
    def name(self) -> str:
        """TASK-MEMBER: the name of the episode in its run, or in its step of a training run."""
        return f"{self.trajectory.task.group}-{self.trajectory.member}"


def recorded_files(path: Path) -> list[Path]:
    """Return the files with trajectories in the folder of a run, or `path` itself; [] if there are none."""
    files = [path / "trajectories.jsonl", *rank_files(path)] if path.is_dir() else [path]
    return [file for file in files if file.is_file()]


def read_recorded(path: Path, step: int | None = None) -> list[Recorded]:
    """Return the trajectories of a run's folder or of one file; only those of `step` unless it is None.

    Raise BadRequestError if there is no such file or step, or, with the number of the line, for a line that is damaged.
    """
    files = recorded_files(path)
    if not files:
        file = path / "trajectories.jsonl" if path.is_dir() else path
        raise BadRequestError(f"There is no file {file}. Name the folder of a run, or a trajectories.jsonl.")
    found = [recorded for file in files for recorded in _read(file, step)]
    if step is not None and not found:
        steps = sorted({r.step for file in files for r in _read(file, None) if r.step is not None})
        has = f"It has the steps {steps[0]} to {steps[-1]}." if steps else "It has no steps: leave --step out."
        raise BadRequestError(f"{path} has no trajectory of step {step}. {has}")
    return found


def _read(file: Path, step: int | None) -> list[Recorded]:
    found = []
    for where, line in numbered_lines(file):
        label = decode_json(line, _Label, where)
        if step is None or label.step == step:
            found.append(Recorded(read_trajectory(line, where), label.step, label.rank))
    return found
