"""The files of a run: what each rank writes is read again, over starts, lost steps and removed segments."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.torchrun import expect_passed, torchrun
from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.files.segments import remove_oldest
from verl_server.rollout.trajectory import Trajectory
from verl_server.train import run_writer
from verl_server.train.batches import MicroBatch, Sample, sampled_positions
from verl_server.train.evaluations import best_evaluated_step
from verl_server.train.metrics import StepMetrics, describe_rollout
from verl_server.train.options import GRPOConfig
from verl_server.train.rollout_report import Failure, RolloutReport
from verl_server.train.run_writer import RunWriter
from verl_server.train.trained_record import TrainedRecord, age_of
from verl_server.watch import run_records
from verl_server.watch.index.line_rows import line_row
from verl_server.watch.recorded import read_recorded
from verl_server.watch.run_files import read_evaluations, read_events, read_metrics, read_trained
from verl_server.watch.run_records import (
    AnyEvent,
    Evaluation,
    RunEvent,
    RunResumed,
    RunStarted,
    SegmentRemoved,
    StepBegan,
    TrainedTrajectory,
)

FIRST, SECOND, THIRD = "00000001", "00000002", "00000003"
EVENTS = [kind for kind in vars(run_records).values() if isinstance(kind, type) and issubclass(kind, RunEvent)]


def metrics_of(step: int, incarnation: str = FIRST) -> StepMetrics:
    return describe_rollout(RolloutReport(), step=step, version=f"{step}@{incarnation}", ranks=1, gap=None)


def started() -> RunStarted:
    return RunStarted(ranks=1, version="1")


def resumed(step: int) -> RunResumed:
    return RunResumed(ranks=1, version="1", next_step=step, checkpoint=f"checkpoint-{step}")


def write_steps(files: RunWriter, first: int, last: int) -> None:
    for step in range(first, last):
        files.record(metrics_of(step, files.incarnation))
        files.record_trajectories(step, [make_trajectory(0, float(step))])
        files.record_trained([trained(step)])


def evaluation(step: int) -> Evaluation:
    return Evaluation(
        step=step, version="1@00000001", episodes=1, failed=0, reward=0.5, success=0.0, seconds=1.0, push_delay=0.0
    )


def test_evaluations_of_lost_weights_are_left_out(tmp_path: Path) -> None:
    """The weights from which a run goes on are not lost."""
    files = RunWriter(tmp_path, FIRST)
    files.begin(started())
    for step in (0, 2, 4):
        files.record_evaluation(evaluation(step))
        files.record_held_out(step, [make_trajectory(0, 1.0)])
    files.close()
    files = RunWriter(tmp_path, SECOND)
    files.begin(resumed(2))
    files.record_evaluation(evaluation(4))
    files.close()
    found = [(e.step, e.incarnation) for e in read_evaluations(tmp_path)]
    assert found == [(0, FIRST), (2, FIRST), (4, SECOND)]
    assert [e.step for e in read_evaluations(tmp_path, lost=True)] == [0, 2, 4, 4]
    assert best_evaluated_step(tmp_path) == 4
    assert not (tmp_path / "trajectories-rank0.jsonl").exists()
    assert len((tmp_path / "held-out-rank0.jsonl").read_bytes().splitlines()) == 3


def trained(step: int) -> TrainedTrajectory:
    return TrainedTrajectory(
        step=step, sampled_step=step, group=0, member=0, advantage=0.5, age=1, positions=[2], logprobs=[-1.5]
    )


@pytest.mark.parametrize("kind", [kind for kind in EVENTS if kind is not RunEvent], ids=lambda kind: kind.__name__)
def test_each_event_is_read_as_it_was_written(tmp_path: Path, kind: type[AnyEvent]) -> None:
    values = {
        "str": "text",
        "GroupFate": "trained",
        "int": 3,
        "float": 0.5,
        "float | None": 1.5,
        "Severity | None": "error",
        "bool": True,
        "str | None": None,
        "dict[str, float]": {"train": 1.5},
    }
    event = kind(**{name: values[str(hint)] for name, hint in kind.__annotations__.items()})
    files = RunWriter(tmp_path, FIRST)
    files.note(event)
    assert list(read_events(tmp_path)) == [event]
    assert event.incarnation == FIRST and event.time > 0
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert line["kind"] == kind.__struct_config__.tag


def test_events_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    files = RunWriter(tmp_path, FIRST)
    files.note(StepBegan(step=1))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "of tomorrow", "time": 1.0}\n{"kind": "step_began", "step": 2, "later": 1}\n{"kind": "cut')
    assert {event.step for event in read_events(tmp_path) if isinstance(event, StepBegan)} == {1, 2}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(BadRequestError, match=r"events\.jsonl:4"):
        list(read_events(tmp_path))


def test_lines_of_steps_that_run_again_are_told_from_the_lost_ones(tmp_path: Path) -> None:
    """The first start is killed after step 4, the second after step 3; the third goes on from step 2."""
    for incarnation, begin, first, last in (
        (FIRST, started(), 0, 5),
        (SECOND, resumed(3), 3, 4),
        (THIRD, resumed(2), 2, 4),
    ):
        files = RunWriter(tmp_path, incarnation)
        files.begin(begin)
        write_steps(files, first, last)
        files.close()
    current = [(0, FIRST), (1, FIRST), (2, THIRD), (3, THIRD)]
    assert [(line["step"], line["incarnation"]) for line in read_metrics(tmp_path)] == current
    assert [(r.step, r.incarnation) for r in read_recorded(tmp_path)] == current
    assert [(t.step, t.incarnation) for t in read_trained(tmp_path)] == current
    assert len(list(read_metrics(tmp_path, lost=True))) == len(read_recorded(tmp_path, lost=True)) == 8
    assert len(list(read_trained(tmp_path, lost=True))) == 8
    with pytest.raises(BadRequestError, match=r"no trajectory of step 4\. It has the steps 0 to 3"):
        read_recorded(tmp_path, step=4)


def test_a_run_of_an_earlier_version_is_read_and_goes_on(tmp_path: Path) -> None:
    lines = [{"step": step, "weight_version": f"{step}@{FIRST}"} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    old = [{"step": step, **msgspec.to_builtins(make_trajectory(0, 1.0))} for step in range(4)]
    for name in ("trajectories.jsonl", "trajectories-rank0.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in old))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert [r.step for r in read_recorded(tmp_path)] == [0, 1, 2, 3] * 2
    files = RunWriter(tmp_path, SECOND)
    files.begin(resumed(3))
    write_steps(files, 3, 4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert [(r.step, r.incarnation) for r in read_recorded(tmp_path)] == [(s, None) for s in (0, 1, 2) * 2] + [
        (3, SECOND)
    ]


def test_the_oldest_trajectories_are_removed_and_an_event_says_so(tmp_path: Path) -> None:
    most = 40_000
    writers = [RunWriter(tmp_path, FIRST, rank=rank, ranks=2, kept_bytes=most) for rank in (0, 1)]
    writers[0].begin(started())
    for step in range(100):
        for rank, files in enumerate(writers):
            files.record_trajectories(step, [make_trajectory(rank, 1.0, 20)])
            files.record_trained([trained(step)])
    kept = [file for pattern in ("trajectories-rank*", "trained-rank*") for file in tmp_path.glob(pattern)]
    assert most / 2 < sum(file.stat().st_size for file in kept) <= most
    steps = [r.step for r in read_recorded(tmp_path) if r.rank == 1]
    assert steps == list(range(steps[0] or 0, 100)) and steps[0] != 0
    removed = [event for event in read_events(tmp_path) if isinstance(event, SegmentRemoved)]
    assert {event.rank for event in removed} == {0, 1}
    assert not {event.file for event in removed} & {file.name for file in kept}
    assert all(event.bytes > 0 for event in removed)
    nothing = RunWriter(tmp_path / "nothing", FIRST, kept_bytes=0)
    write_steps(nothing, 0, 2)
    assert [file.name for file in (tmp_path / "nothing").iterdir()] == ["metrics.jsonl"]


def test_segments_are_looked_for_only_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous run writes each episode alone, and the search takes longer than the writing."""
    looks: list[int] = []
    monkeypatch.setattr(run_writer, "remove_oldest", lambda *_: looks.append(1) or remove_oldest(*_))
    for incarnation in (FIRST, SECOND):  # the second start counts what the first one wrote
        files = RunWriter(tmp_path, incarnation, kept_bytes=40_000)
        while not looks:
            files.record_trajectories(0, [make_trajectory(0, 1.0, 20)])
        found = sum(file.stat().st_size for file in tmp_path.glob("trajectories*"))
        assert 30_000 < found <= 40_000
        if incarnation == FIRST:
            looks.clear()
            files.record_trained([trained(0)])
            assert not looks, "a segment was removed, so there is room"
        files.close()


def test_a_run_that_goes_on_with_fewer_ranks_keeps_the_bound(tmp_path: Path) -> None:
    most, steps = 40_000, iter(range(1000))
    for incarnation, ranks in ((FIRST, 4), (SECOND, 2)):
        writers = [RunWriter(tmp_path, incarnation, rank=rank, ranks=ranks, kept_bytes=most) for rank in range(ranks)]
        writers[0].begin(started() if ranks == 4 else resumed(100))
        for step in (next(steps) for _ in range(100)):
            for rank, files in enumerate(writers):
                files.record_trajectories(step, [make_trajectory(rank, 1.0, 20)])
        for files in writers:
            files.close()
        assert sum(file.stat().st_size for file in tmp_path.glob("trajectories-rank*")) <= most
    removed = [event for event in read_events(tmp_path) if isinstance(event, SegmentRemoved)]
    assert {event.rank for event in removed if event.incarnation == SECOND} == {0, 1, 2, 3}
    assert all(f"-rank{event.rank}." in event.file for event in removed)


def test_a_cut_line_of_each_file_is_left_out(tmp_path: Path) -> None:
    files = RunWriter(tmp_path, FIRST)
    files.begin(started())
    write_steps(files, 0, 3)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-5])
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    assert [r.step for r in read_recorded(tmp_path)] == [t.step for t in read_trained(tmp_path)] == [0, 1]
    again = RunWriter(tmp_path, SECOND)
    again.begin(resumed(2))
    write_steps(again, 2, 3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    assert [r.step for r in read_recorded(tmp_path)] == [t.step for t in read_trained(tmp_path)] == [0, 1, 2]


def test_an_event_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").mkdir()  # writing fails
    files = RunWriter(tmp_path, FIRST)
    with caplog.at_level(logging.ERROR):
        files.note(StepBegan(step=1))
    assert "StepBegan cannot be written" in caplog.text
    with pytest.raises(OSError, match="directory"):
        files.begin(started())


def test_failures_have_the_incarnation(tmp_path: Path) -> None:
    failure = Failure(
        step=3,
        rank=1,
        url="u",
        stop_reason="env_error",
        fault="infrastructure",
        error="e",
        seed=0,
        group=0,
        episode_id=None,
        turns=0,
    )
    RunWriter(tmp_path, FIRST).record(metrics_of(3), [failure])
    (line,) = map(json.loads, (tmp_path / "errors.jsonl").read_text().splitlines())
    assert line["rank"] == 1 and line["incarnation"] == FIRST


def test_figures_that_are_not_finite_are_named(tmp_path: Path) -> None:
    files = RunWriter(tmp_path, FIRST)
    metrics = metrics_of(0)
    metrics.reward, metrics.losses = math.nan, {"kl": math.inf, "policy": 0.5}
    files.record(metrics)
    files.record(metrics_of(1))
    files.close()
    odd, fine = read_metrics(tmp_path)
    assert odd["reward"] is None and odd["losses"] == {"kl": None, "policy": 0.5}
    assert odd["not_finite"] == ["reward", "losses.kl"] and fine["not_finite"] == []


def test_the_first_pass_over_each_trajectory_is_recorded() -> None:
    record = TrainedRecord(GRPOConfig())
    samples = [Sample(versioned(make_trajectory(group, 1.0, 2 + group), "4@" + FIRST), 0.5) for group in (0, 1)]
    batch = MicroBatch.of(samples, torch.device("cpu"))
    logprobs = torch.tensor([-1.0, -2.0, -3.0, math.nan, -0.12345678])
    record.note(samples, batch, logprobs, logprobs.abs())
    record.note(samples[:1], MicroBatch.of(samples[:1], torch.device("cpu")), torch.zeros(2), None)
    record.note([], MicroBatch.of([], torch.device("cpu")), torch.zeros(0), None)  # as a rank without samples
    first, second = record.take(7, "6@" + FIRST)
    assert (first.step, first.group, first.age, first.advantage) == (7, 0, 2, 0.5)
    assert first.positions == sampled_positions(samples[0].trajectory).tolist() == [2, 3]
    assert (first.logprobs, first.entropy, first.loss_weights) == ([-1.0, -2.0], [1.0, 2.0], [])
    sampled = [samples[0].trajectory.logprobs[at] for at in first.positions]
    distances = [abs(own - other) for own, other in zip([-1.0, -2.0], sampled, strict=True)]
    assert (first.gap_mean, first.gap_max) == (pytest.approx(sum(distances) / 2), pytest.approx(max(distances)))
    assert (second.gap_mean, second.gap_max) == (None, None), "a number is not finite"
    assert second.logprobs == [-3.0, None, -0.123457] and record.take(7, "6@" + FIRST) == []


def test_the_line_of_a_trained_trajectory_is_found_beside_those_it_replaced(tmp_path: Path) -> None:
    attempts = [make_trajectory(3, reward) for reward in (None, None, 1.0)]
    for number, trajectory in enumerate(attempts):
        trajectory.attempt = number
    record, (sample,) = TrainedRecord(GRPOConfig()), [Sample(attempts[-1], 0.5)]
    record.note([sample], MicroBatch.of([sample], torch.device("cpu")), torch.zeros(3), None)
    files = RunWriter(tmp_path, FIRST)
    files.record_trajectories(0, [attempts[-1], *attempts[:-1]])  # replaced ones come last, as in `run`
    files.record_trained(record.take(0, "0@" + FIRST))

    def keys(t: Any) -> tuple[Any, ...]:
        return t.member, t.attempt, t.session, t.branch

    (found,) = read_trained(tmp_path)
    same = [r.trajectory for r in read_recorded(tmp_path) if r.step == found.sampled_step]
    assert [t.reward for t in same if (t.task.group, *keys(t)) == (found.group, *keys(found))] == [1.0]


def test_the_factor_of_each_token_in_the_loss_is_recorded() -> None:
    """The importance weights are 4, 2 and 1; the second and third token were drawn under a mask of the sampler."""
    trajectory = make_trajectory(0, 1.0, 3)
    trajectory.policy_logprobs = [0.0, 0.0, -1.0, -1.5, -4.0]
    samples = [Sample(trajectory, 0.5, torch.tensor([-1.0, -1.5, -4.0]) + torch.tensor([4.0, 2.0, 1.0]).log())]
    for options, expected in (
        ({}, []),
        ({"loss": "tis"}, [2.0, 2.0, 1.0]),
        ({"loss": "decoupled"}, [4.0, 2.0, 1.0]),
        ({"loss": "decoupled", "token_mask": (0.5, 3.0)}, [0.0, 2.0, 1.0]),
        ({"sequence_mask": (0.5, 1.9)}, [0.0, 0.0, 0.0]),
        ({"correction_bound": 3.0}, [1.0, 0.606531, 0.049787]),
        ({"loss": "tis", "correction_bound": 3.0}, [2.0, 1.213061, 0.049787]),
    ):
        config = GRPOConfig(**options)
        record = TrainedRecord(config)
        batch = MicroBatch.of(samples, torch.device("cpu"), config.correction_bound)
        record.note(samples, batch, torch.zeros(3), None)
        (found,) = record.take(0, "0@" + FIRST)
        assert found.loss_weights == pytest.approx(expected, abs=1e-6), options


def test_the_age_is_that_of_the_oldest_token() -> None:
    trajectory = versioned(make_trajectory(0, 1.0), "4@" + FIRST)
    trajectory.weight_versions[-1] = "2@" + FIRST
    assert age_of(trajectory, "5@" + FIRST) == 3
    assert age_of(trajectory, "5@" + SECOND) is None and age_of(trajectory, "free") is None
    trajectory.weight_versions[-1] = "free"
    assert age_of(trajectory, "5@" + FIRST) is None


def versioned(trajectory: Trajectory, version: str) -> Trajectory:
    trajectory.weight_versions = [version if mask else "" for mask in trajectory.loss_mask]
    return trajectory


def test_threads_write_side_by_side(tmp_path: Path) -> None:
    """A thread writes episodes when they end, while another one trains. Each removes the oldest segments."""
    files, interval = RunWriter(tmp_path, FIRST, kept_bytes=8_000), sys.getswitchinterval()
    files.begin(started())

    def episodes(step: int) -> None:
        files.record_trajectories(step, [make_trajectory(0, 1.0, 2)])
        files.record_line(b'{"step": 0}\n', line_row("trajectory", b'{"step": 0}\n'))

    def training(step: int) -> None:
        files.note(StepBegan(step=step))
        files.record_trained([trained(step)])

    def repeat(work: Callable[[int], None]) -> None:
        for step in range(150):
            work(step)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(repeat, work) for work in (episodes, training) * 2]
            for each in running:
                each.result(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert sum(file.stat().st_size for kind in ("traj", "trained") for file in tmp_path.glob(f"{kind}*")) <= 8_000
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "step_began" for line in lines) == 300
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    removed = [line["file"] for line in lines if line["kind"] == "segment_removed"]
    assert len(removed) == len(set(removed)) > 0


def test_two_ranks_write_their_own_files(tmp_path: Path) -> None:
    torchrun(2, "tests.train.run_writer_ranks", tmp_path / "run", results=tmp_path)
    expect_passed(tmp_path, 2, "written")
    assert [(r.step, r.rank) for r in read_recorded(tmp_path / "run")] == [
        (s, rank) for rank in (0, 1) for s in range(3)
    ]
    assert [t.rank for t in read_trained(tmp_path / "run")] == [0] * 3 + [1] * 3
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2]
    kinds = ["RunStarted", *["StepBegan", "StepEnded"] * 3]
    assert [type(event).__name__ for event in read_events(tmp_path / "run")] == kinds
