"""Writes folders of runs for the tests of the index, with the writers of the runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory
from verl_server.train.run_writer import RunWriter
from verl_server.watch.index.rows import EpisodeFilter, EpisodeRow
from verl_server.watch.index.run_index import RunIndex
from verl_server.watch.run_records import GroupDone, GroupFate, RunResumed, RunStarted, TrainedTrajectory

FIRST, SECOND = "00000001", "00000002"


def episode(
    group: int,
    member: int = 0,
    reward: float | None = 1.0,
    *,
    length: int = 3,
    attempt: int = 0,
    session: str = "",
    branch: int = 0,
    seed: int | None = None,
    version: str = f"4@{FIRST}",
    began: float | None = 1000.0,
) -> Trajectory:
    """Return an episode that took a second."""
    t = Trajectory(task=Task(seed=group if seed is None else seed, group=group, member=member))
    t.append_observation({"text": "What is it?"}, [1, 2])
    if length:
        t.append_output([3] * length, [-0.5] * length, [version] * length)
        t.turns[0].action = {"calls": [{"name": "look", "arguments": {"where": "under the Sofa"}}]}
    t.turns[0].reward = reward
    t.finish(*((StopReason.DONE, None) if reward is not None else (StopReason.ENV_ERROR, "the server is full")))
    t.member, t.attempt, t.session, t.branch, t.began = member, attempt, session, branch, began
    t.events = [Event("generate", 0.0, 0.25), Event("env", 0.25, 1.0)]
    return t


def trained(step: int, group: int, member: int = 0, sampled_step: int | None = None) -> TrainedTrajectory:
    return TrainedTrajectory(
        step=step,
        sampled_step=step if sampled_step is None else sampled_step,
        group=group,
        member=member,
        advantage=0.5,
        age=1,
        positions=[2],
        logprobs=[-0.5],
        entropy=[0.25],
        gap_mean=0.125,
        gap_max=0.25,
    )


def writer(folder: Path, incarnation: str = FIRST, *, resumed_at: int | None = None, rank: int = 0) -> RunWriter:
    files = RunWriter(folder, incarnation, rank=rank)
    if rank == 0 and resumed_at is None:
        files.begin(RunStarted(ranks=1, version="1"))
    elif rank == 0:
        assert resumed_at is not None
        files.begin(RunResumed(ranks=1, version="1", next_step=resumed_at, checkpoint=f"checkpoint-{resumed_at}"))
    return files


def write_steps(files: RunWriter, first: int, last: int, *, groups: int = 2, size: int = 2) -> None:
    """Write synchronous steps. In each, the members of a group have the rewards 0, 1, 2 and so on."""
    for step in range(first, last):
        places = [(group, member) for group in range(groups) for member in range(size)]
        files.record_trajectories(step, [episode(group, member, float(member)) for group, member in places])
        files.record_trained([trained(step, group, member) for group, member in places])


def done(group: int, fate: GroupFate, step: int, start_step: int) -> GroupDone:
    return GroupDone(group=group, fate=fate, step=step, start_step=start_step, start_version=start_step)


def follow(index: RunIndex) -> RunIndex:
    """Index all that there is."""
    while index.poll(10.0):
        pass
    return index


def answers(index: RunIndex) -> list[object]:
    """Return what an index says about a run, as far as it does not depend on how the rows were found."""
    steps = index.steps(lost=True)
    return [steps, [index.groups(step.name) for step in steps], [row.row for row in all_rows(index)]]


def all_rows(index: RunIndex, limit: int = 100) -> Iterator[EpisodeRow]:
    """Yield all episodes, also lost ones, page by page."""
    cursor = None
    while True:
        page = index.episodes(EpisodeFilter(lost=True), limit=limit, after=cursor)
        yield from page.rows
        if (cursor := page.cursor) is None:
            return
