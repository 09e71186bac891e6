"""Whoever follows a run sees the same as whoever reads its files at the end, and changes nothing in its folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_server.files.run_output import claim_file, claim_folder, is_claimed, store_settings
from verl_server.files.segments import Segments
from verl_server.watch.index.run_tail import RunTail
from verl_server.watch.run_files import read_events, read_metrics
from verl_server.watch.run_records import (
    Alarm,
    Evaluation,
    EvaluationBegan,
    RunEnded,
    RunEvent,
    RunResumed,
    RunStarted,
    SegmentRemoved,
    StepBegan,
    StepEnded,
)

FIRST, SECOND = "00000001", "00000002"


class Writer:
    """Writes metrics and events as a run does. Its clock goes on by a second with each event."""

    def __init__(self, folder: Path, incarnation: str = FIRST, now: float = 1000.0, **sizes: int) -> None:
        self.incarnation, self.now = incarnation, now
        self.metrics = Segments(folder / "metrics.jsonl", **sizes)
        self.events = Segments(folder / "events.jsonl", **sizes)
        self.evaluations = Segments(folder / "evaluations.jsonl", **sizes)

    def note(self, event: RunEvent, log: Segments | None = None) -> None:
        self.now += 1
        event.time, event.incarnation = self.now, self.incarnation
        (log or self.events).append([msgspec.json.encode(event) + b"\n"])

    def step(self, step: int, **figures: Any) -> None:
        self.note(StepBegan(step=step))
        label = {"step": step, "rank": 0, "incarnation": self.incarnation, "time": self.now}
        self.metrics.append([msgspec.json.encode(label | figures) + b"\n"])
        self.note(StepEnded(step=step, phases={"rollout": 0.5, "train": float(step)}))

    def evaluate(self, step: int, reward: float | None = 0.5, *, seconds: float = 10.0) -> None:
        """Write an evaluation whose line follows its end by a minute, as in an asynchronous run."""
        self.note(EvaluationBegan(step=step, version=f"{step}@{self.incarnation}"))
        self.now += seconds + 60
        record = Evaluation(
            step=step, version=f"{step}@{self.incarnation}", episodes=1, failed=0, reward=reward, success=None,
            seconds=seconds, push_delay=0.0, incarnation=self.incarnation, time=self.now,
        )  # fmt: skip
        self.evaluations.append([msgspec.json.encode(record) + b"\n"])

    def begin(self, first: int = 0) -> None:
        start = RunResumed(ranks=1, version="1", next_step=first, checkpoint="c") if first else None
        self.note(start or RunStarted(ranks=1, version="1"))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def followed(path: Path) -> RunTail:
    tail = RunTail(path)
    tail.poll()
    return tail


def test_a_growing_run_reads_as_it_does_at_the_end(tmp_path: Path) -> None:
    writer, tail = Writer(tmp_path, segment_bytes=400), RunTail(tmp_path)
    assert not tail.poll() and tail.steps() == [] and tail.metrics(["reward"])["reward"] == []
    writer.begin()
    for step in range(12):
        writer.step(step, reward=step / 2, losses={"kl": 0.1 * step}, waits={"episodes": step})
        generation = tail.generation
        assert tail.poll() and tail.generation > generation and tail.steps() == list(range(step + 1))
    assert not tail.poll()
    for reader in (tail, followed(tmp_path)):
        found, lines = reader.metrics(["reward", "losses.kl", "waits.episodes"]), list(read_metrics(tmp_path))
        assert found["reward"] == [line["reward"] for line in lines]
        assert found["losses.kl"] == [line["losses"]["kl"] for line in lines]
        assert found["waits.episodes"] == list(range(12)) and type(found["waits.episodes"][3]) is int
        assert found["time"] == [line["time"] for line in lines]
        assert [event for _, event in reader.events()] == list(read_events(tmp_path))
        assert [number for number, _ in reader.events()] == list(range(1, 26))
        assert reader.line(7) == lines[7] and reader.line(12) is None
        assert reader.progress[0] == reader.progress[1] > 2000
        assert (reader.damaged, reader.warnings) == (0, [])
        assert (reader.started, reader.last) == (1001.0, writer.now)


def test_steps_that_ran_again_are_left_out(tmp_path: Path, writer: Writer) -> None:
    tail = RunTail(tmp_path)
    writer.begin()
    for step in range(5):
        writer.step(step, reward=0.0)
    tail.poll()
    again = Writer(tmp_path, SECOND, 2000.0)
    again.begin(3)
    tail.poll()
    assert tail.steps() == [0, 1, 2]
    again.step(3, reward=1.0)
    for reader in (tail, followed(tmp_path)):
        reader.poll()
        assert reader.metrics(["reward"])["reward"] == [0, 0, 0, 1] and reader.steps(lost=True) == [0, 1, 2, 3, 3, 4]
        assert reader.metrics(["reward"], 2, 3) == {"step": [2, 3], "time": [1006.0, 2002.0], "reward": [0.0, 1.0]}
        assert reader.metrics([], lost=True)["step"] == [0, 1, 2, 3, 3, 4]
        assert (reader.line(3) or {})["incarnation"] == SECOND and reader.line(4) is None
        assert [(each.step, each.is_lost) for each in reader.times(3, lost=True)] == [(3, True), (3, False), (4, True)]
        assert [each.began for each in reader.times(3)] == [2002.0]


def test_a_phase_that_few_steps_have_is_in_its_place(tmp_path: Path, writer: Writer) -> None:
    steps = [{"rollout": 1.0, "train": 2.0, "sync": 3.0}, {"rollout": 1.0, "train": 2.0, "held": 4.0, "sync": 3.0}]
    for step, phases in enumerate([*steps, {"before": 1.0, **steps[0]}]):
        writer.note(StepBegan(step=step))
        writer.note(StepEnded(step=step, phases=phases))
    tail = followed(tmp_path)
    assert [list(tail.phases(step)) for step in range(3)] == [
        ["rollout", "train", "sync"],
        ["rollout", "train", "held", "sync"],
        ["before", "rollout", "train", "sync"],
    ]
    assert tail.names() == [f"phases.{name}" for name in ("before", "rollout", "train", "held", "sync")]


def test_evaluations_are_followed_with_their_begins(tmp_path: Path) -> None:
    writer, tail = Writer(tmp_path, segment_bytes=300), RunTail(tmp_path)
    writer.begin()
    for step in (0, 5, 10):
        generation = tail.generation
        writer.evaluate(step)
        assert tail.poll() and tail.generation > generation
    for reader in (tail, followed(tmp_path)):
        found = reader.evaluations()
        assert [row.record.step for row in found] == [0, 5, 10]
        assert [(row.began, row.ended) for row in found] == [(begun, begun + 10) for begun in (1002.0, 1073.0, 1144.0)]
        assert reader.progress[0] == reader.progress[1]
    assert not tail.poll()


def test_evaluations_of_lost_weights_are_left_out(tmp_path: Path, writer: Writer) -> None:
    """The second start runs step 10 again: the weights that step 9 made are still there."""
    writer.begin()
    for step in (5, 10, 15):
        writer.evaluate(step)
    tail = followed(tmp_path)
    again = Writer(tmp_path, SECOND, 2000.0)
    again.begin(10)
    again.evaluate(15, 0.75)
    tail.poll()
    assert [(row.record.step, row.record.reward) for row in tail.evaluations()] == [(5, 0.5), (10, 0.5), (15, 0.75)]
    assert [row.record.step for row in tail.evaluations(lost=True)] == [5, 10, 15, 15]


def test_damaged_lines_of_evaluations_are_counted(tmp_path: Path, writer: Writer) -> None:
    writer.evaluations.append([b'{"step": 0, "reward": "high"}\n', b"{\n"])
    writer.evaluate(5)
    (tmp_path / "events.jsonl").unlink()
    tail = followed(tmp_path)
    assert [row.began for row in tail.evaluations()] == [writer.now - 10], "without its event, from the line's time"
    assert tail.damaged == 2 and "evaluations.jsonl" in tail.warnings[0]


def test_an_evaluation_plays_until_it_has_a_line(tmp_path: Path, writer: Writer) -> None:
    claim_folder(tmp_path)
    writer.begin()
    writer.evaluate(0)
    tail = followed(tmp_path)
    assert tail.evaluation_playing() is None
    writer.note(EvaluationBegan(step=5, version="5@1"))
    tail.poll()
    assert tail.evaluation_playing() == (5, writer.now)
    Writer(tmp_path, SECOND, 2000.0).begin(3)
    tail.poll()
    assert tail.evaluation_playing() is None, "the start that began it was killed"


def test_absent_and_infinite_figures_differ(tmp_path: Path, writer: Writer) -> None:
    writer.step(0, reward=None, many=2**40, losses={"kl": 1.0})
    writer.step(1, reward=2, losses={"kl": math.nan, "policy": -1}, flag=True, name="text", ages={"1": 3})
    writer.metrics.append([b'{"step": 2, "reward": NaN, "losses": {"kl": Infinity}, "many": 1}\n'])
    writer.metrics.append(
        [b'{"step": 3, "losses.kl": 3, "losses": {"kl": 1e5}, "many": 123456789012345678901234567890}\n']
    )
    tail = followed(tmp_path)
    found = tail.metrics(["reward", "losses.kl", "losses.policy", "many", "flag", "ages.1", "name", "none"])
    assert found["reward"][:2] == [None, 2] and math.isnan(found["reward"][2]) and found["reward"][3] is None
    kl = found["losses.kl"]
    assert kl[0] == 1.0 and math.isnan(kl[1]) and kl[2:] == [math.inf, 3], (
        "JSON has no NaN, so that it is null in a dict"
    )
    writer.step(4, reward=None, logprob_gap=None, not_finite=["logprob_gap", "losses.kl", "nothing", 3])
    tail.poll()
    last = {name: column[-1] for name, column in tail.metrics(["reward", "logprob_gap", "nothing"]).items()}
    assert last["reward"] is last["nothing"] is None and math.isnan(last["logprob_gap"])
    assert found["losses.policy"] == [None, -1, None, None] and found["ages.1"] == [None, 3, None, None]
    assert found["many"] == [2**40, None, 1, 123456789012345678901234567890.0]
    assert found["flag"] == [None, 1, None, None] and found["name"] == found["none"] == [None] * 4
    assert tail.names()[:3] == ["time", "many", "losses.kl"] and "name" not in tail.names()
    assert found.keys() - {"none", "name"} <= {"step", "time", *tail.names()}


def test_damaged_lines_are_counted_and_named(tmp_path: Path, writer: Writer) -> None:
    writer.begin()
    writer.step(0, reward=1.0)
    writer.metrics.append([b"{\n", b'{"step": -1}\n', b"[]\n", b'{"reward": 2}\n'])
    writer.step(1, reward="text")
    writer.events.append([b'{"kind": "step_began"}\n', b'{"kind": "of a later version"}\n', b"\0\0\n"])
    tail = followed(tmp_path)
    assert tail.damaged == 5 and tail.steps() == [0, 1] and len(tail.events()) == 5
    assert all(str(tmp_path) in text and "byte" in text for text in tail.warnings)
    writer.step(2, reward=1.0)
    tail.poll()
    assert tail.damaged == 6, "the last line of all was tried again first"
    assert tail.steps() == [0, 1, 2] == [each.step for each in tail.times()]


def test_a_run_in_the_place_of_another_is_read_from_its_beginning(tmp_path: Path, writer: Writer) -> None:
    writer.step(0, reward=1.0)
    writer.step(1, reward=1.0)
    tail = followed(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    assert tail.poll() and tail.steps() == [] and tail.events() == []
    Writer(tmp_path, SECOND).step(5, reward=2.0)
    assert tail.poll() and tail.metrics(["reward"])["reward"] == [2.0] and tail.steps() == [5]


def test_events_are_paged_and_chosen_by_kind(tmp_path: Path, writer: Writer) -> None:
    writer.begin()
    for step in range(5):
        writer.step(step)
        writer.note(Alarm(name="logprob_gap", step=step, message="m", stops=False))
    writer.note(SegmentRemoved(rank=1, file="f", bytes=1), Segments(tmp_path / "events-rank1.jsonl"))
    tail = followed(tmp_path)
    assert [event.step for _, event in tail.events(["alarm"])] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    numbers = [number for number, _ in tail.events(["alarm", "step_began"])]
    assert numbers == [2, 4, 5, 7, 8, 10, 11, 13, 14, 16]
    assert [number for number, _ in tail.events(["alarm", "step_began"], after=7, limit=2)] == [8, 10]
    assert [number for number, _ in tail.events(["alarm", "step_began"], newest=True, limit=2)] == [14, 16]
    assert [number for number, _ in tail.events(after=15)] == [16, 17]
    assert tail.events(["segment_removed"])[0][0] == 17 and tail.events(["no kind"]) == []


def test_the_times_of_steps_are_known(tmp_path: Path, writer: Writer) -> None:
    writer.begin()
    for step in range(10):
        writer.step(step, reward=0.0)
    writer.note(StepEnded(step=10, phases={"train": 0.25, "record": 0.5}))
    writer.metrics.append([b'{"step": 10, "weight_version": "3@00000001"}\n'])
    writer.note(StepBegan(step=11))
    tail = followed(tmp_path)
    assert tail.phases(3) == {"rollout": 0.5, "train": 3.0} and tail.phases(11) == tail.phases(12) == {}
    last = tail.times(10)
    assert [(each.began, each.ended) for each in last] == [(1021.25, 1022.0), (1023.0, None)]
    assert [each.step for each in tail.steps_between(1004.5, 1008.0)] == [1, 2, 3]
    assert [each.step for each in tail.steps_between(0, 2000, limit=3)] == [0, 4, 8]
    assert tail.metrics(["phases.train", "phases.record"], 8)["phases.train"] == [8.0, 9.0, 0.25]
    assert tail.metrics(["phases.record"], 8)["phases.record"] == [None, None, 0.5]
    assert tail.names()[-3:] == ["phases.rollout", "phases.train", "phases.record"]


def test_a_run_is_running_while_a_process_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tail = RunTail(folder)
    assert not tail.poll() and tail.state == "unknown"
    claim = claim_folder(folder)
    writer = Writer(folder)
    writer.begin()
    assert tail.poll() and tail.state == "running"
    claim.release()
    assert tail.poll() and tail.state == "unknown", "it was killed"
    writer.note(RunEnded(exit_status=0))
    assert tail.poll() and tail.state == "ended" and (tail.exit_status, tail.error) == (0, None)
    writer.begin(1)
    assert tail.poll() and tail.state == "unknown" and tail.exit_status is None
    writer.note(RunEnded(exit_status=4, error="LogprobGapError: far"))
    assert tail.poll() and tail.state == "failed" and (tail.exit_status, tail.error) == (4, "LogprobGapError: far")


def test_a_rollout_has_a_state_and_settings_too(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    claim = claim_file(file)
    store_settings(tmp_path / "t.jsonl.run.json", {"command": "rollout"})
    tail = followed(file)
    assert (tail.state, tail.settings, tail.steps(), tail.events()) == ("running", {"command": "rollout"}, [], [])
    file.write_text("{}\n")
    claim.release()
    assert tail.poll() and tail.state == "unknown"
    agents = tmp_path / "agents"
    agents.mkdir()
    (agents / "summary.json").write_text("{}")
    assert followed(agents).state == "ended"


def test_a_claim_is_seen_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run"
    assert is_claimed(place) is False
    claim = claim_folder(place)
    assert is_claimed(place) is True
    code = "import pathlib, sys, verl_server.files.run_output as f; print(f.is_claimed(pathlib.Path(sys.argv[1])))"
    other = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True)
    assert other.stdout == "True\n"
    claim.release()
    assert is_claimed(place) is False
    monkeypatch.setattr("verl_server.files.run_output._LOCKS", tmp_path / "absent")
    assert is_claimed(place) is None, "another system"


def test_settings_are_read_again_and_damaged_ones_are_a_warning(tmp_path: Path) -> None:
    tail = followed(tmp_path)
    assert tail.settings == {}
    store_settings(tmp_path / "run.json", {"steps": 3})
    assert tail.poll() and tail.settings == {"steps": 3}
    (tmp_path / "run.json").write_text("{")
    assert not tail.poll() and tail.settings == {"steps": 3} and "run.json" in tail.warnings[0]
    store_settings(tmp_path / "run.json", {"steps": 4})
    assert tail.poll() and tail.settings == {"steps": 4} and tail.warnings == []


def test_nothing_in_the_folder_changes(tmp_path: Path, writer: Writer) -> None:
    writer.begin()
    writer.step(0, reward=1.0)
    (tmp_path / "metrics.1.jsonl").write_text("cut off")
    store_settings(tmp_path / "run.json", {"steps": 3})

    def image() -> dict[str, Any]:
        paths = [tmp_path, *tmp_path.rglob("*")]
        stats = {str(path): (path.stat(), path.read_bytes() if path.is_file() else b"") for path in paths}
        return {name: (s.st_mode, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, data) for name, (s, data) in stats.items()}

    before = image()
    tail = followed(tmp_path)
    tail.events(), tail.metrics(), tail.line(0), tail.times()
    assert image() == before and is_claimed(tmp_path) is False


def test_the_follower_imports_no_large_library() -> None:
    modules = "verl_server.watch.index.run_tail, verl_server.watch.index.session_store"
    code = f"import json, sys, {modules}\nprint(json.dumps(list(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "pydantic", "numpy"} & set(json.loads(found))
