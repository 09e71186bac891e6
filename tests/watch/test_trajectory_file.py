"""A resumed rollout plays again what the infrastructure ended, and no failure of the policy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from verl_server.rollout.faults import FAULTS, FaultRules
from verl_server.rollout.trajectory import Fault, StopReason, Task, Trajectory
from verl_server.watch.trajectory_file import TrajectoryFile


def ended(reason: StopReason, *, is_sampled: bool = True, has_fault: bool = True) -> Trajectory:
    trajectory = Trajectory(task=Task(seed=3))
    trajectory.append_observation({}, [1])
    if is_sampled:
        trajectory.append_output([2], [-1.0], ["0"])
    trajectory.finish(reason)
    if has_fault:
        FaultRules().settle(trajectory)
    return trajectory


def is_finished(folder: Path, trajectory: Trajectory) -> bool:
    """Return True if a run that recorded this one episode does not play it again."""
    with contextlib.closing(TrajectoryFile(folder / "t.jsonl", {"command": "rollout"}, {})) as file:
        file.begin("m")
        file.add(trajectory)
    with contextlib.closing(TrajectoryFile(folder / "t.jsonl", {"command": "rollout"}, {}, resume=True)) as file:
        return file.finished == {(3, 0)}


@pytest.mark.parametrize("reason", list(StopReason))
def test_only_ends_of_the_infrastructure_are_played_again(tmp_path: Path, reason: StopReason) -> None:
    assert is_finished(tmp_path, ended(reason)) == (FAULTS[reason] is not Fault.INFRASTRUCTURE)


def test_an_episode_without_a_sampled_token_and_an_old_failure_are_played_again(tmp_path: Path) -> None:
    for number, (trajectory, finished) in enumerate(
        [
            (ended(StopReason.CONTEXT_FULL, is_sampled=False), False),
            (ended(StopReason.TIME_LIMIT, has_fault=False), False),
            (ended(StopReason.DONE, has_fault=False), True),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert is_finished(folder, trajectory) == finished
