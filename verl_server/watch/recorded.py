"""`read_recorded`: the trajectories that a command recorded, with step and rank if a training run wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import decode_json, numbered_lines
from verl_server.files.segments import read_segments, segment_files
from verl_server.rollout.trajectory import Trajectory, read_trajectory
from verl_server.watch.run_files import Lineage, rank_paths, read_lineage
from verl_server.watch.run_records import Label


@dataclass(frozen=True)
class Recorded:
    trajectory: Trajectory
    step: int | None
    """Step of a training run, None in another run."""
    rank: int | None
    """Rank that played the episode, None in another run."""
    incarnation: str | None = None
    """Incarnation of the start that wrote the line. None in another run, and in one of an earlier version."""

    @property
    def name(self) -> str:
        """TASK-MEMBER: the name of the episode in its run, or in its step of a training run."""
        return f"{self.trajectory.task.group}-{self.trajectory.member}"


def recorded_files(path: Path) -> list[Path]:
    """Return the files with trajectories in the folder of a run, or `path` itself; [] if there are none."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    ranks = [file for rank in rank_paths(path, "trajectories") for file in segment_files(rank)]
    return [file for file in [path / "trajectories.jsonl", *ranks] if file.is_file()]


def read_recorded(
    path: Path, step: int | None = None, *, episode: str | None = None, lost: bool = False
) -> list[Recorded]:
    """Return the trajectories of a run's folder or of one file.

    With `step` or `episode` (TASK-MEMBER), return only theirs; the others are not decoded. With `lost`, return those of
    steps that a resumed run ran again, too. Raise BadRequestError if there is no such file or step, or, with the number
    of the line, for a line that is damaged.
    """
    if not recorded_files(path):
        file = path / "trajectories.jsonl" if path.is_dir() else path
        raise BadRequestError(f"There is no file {file}. Name the folder of a run, or a trajectories.jsonl.")
    lineage = read_lineage(path) if path.is_dir() and not lost else None
    found = list(_read(path, step, episode, lineage))
    if step is not None and not found and not any(key.step == step for _, _, key in _keys(path, lineage)):
        steps = sorted({key.step for _, _, key in _keys(path, lineage) if key.step is not None})
        has = f"It has the steps {steps[0]} to {steps[-1]}." if steps else "It has no steps: leave --step out."
        raise BadRequestError(f"{path} has no trajectory of step {step}. {has}")
    return found


class _Task(msgspec.Struct, frozen=True):
    group: int = 0


class _Key(Label):
    """The keys of a line that say which trajectory it is."""

    task: _Task = _Task()
    member: int = 0


def _read(path: Path, step: int | None, episode: str | None, lineage: Lineage | None) -> Iterator[Recorded]:
    for where, line, key in _keys(path, lineage):
        if step in (None, key.step) and episode in (None, f"{key.task.group}-{key.member}"):
            yield Recorded(read_trajectory(line, where), key.step, key.rank, key.incarnation)


def _keys(path: Path, lineage: Lineage | None) -> Iterator[tuple[str, bytes, _Key]]:
    """Yield (FILE:LINE, line, key) of the lines that `lineage` has; None has all."""
    for where, line in _lines(path):
        key = decode_json(line, _Key, where)
        if lineage is None or lineage.has(key.step, key.incarnation):
            yield where, line, key


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    if not path.is_dir():
        yield from numbered_lines(path)
        return
    if (file := path / "trajectories.jsonl").is_file():
        yield from numbered_lines(file)
    for rank in rank_paths(path, "trajectories"):
        yield from read_segments(rank)
