"""`Trackers` and their process, with packages that a test can break: nothing of a tracker reaches the trainer."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.train.trackers.fake_packages import FakePackages
from tests.train.trackers.steps import evaluation, step_metrics
from tests.waiting import eventually
from verl_server.errors import BadRequestError
from verl_server.train.trackers import process, trackers
from verl_server.train.trackers.kinds import check_loggers
from verl_server.train.trackers.tracked_run import EarlierRuns, Figures, RunIsOver, TrackedRun
from verl_server.train.trackers.trackers import Trackers, open_trackers

BOTH = ("wandb", "trackio")

pytestmark = pytest.mark.usefixtures("real_processes")  # packages are found by PYTHONPATH


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackages:
    folder = tmp_path / "packages"
    folder.mkdir()
    return FakePackages(folder, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sums-1"
    folder.mkdir()
    return folder


def start_of(folder: Path, next_step: int = 0, *, is_resumed: bool = False) -> TrackedRun:
    return TrackedRun(str(folder), {"grpo.learning_rate": 0.01, "tasks": None}, next_step, is_resumed)


def log(run: TrackedRun, *rewards: float, names: tuple[str, ...] = BOTH) -> None:
    """Log a start of a run: a step for each reward, from the run's first step on."""
    opened = Trackers(names, run, flush_seconds=60)
    for step, reward in enumerate(rewards, run.next_step):
        opened.log_step(step_metrics(step, reward))
    opened.close(0)


def test_each_tracker_gets_settings_steps_evaluations_and_the_end(packages: FakePackages, folder: Path) -> None:
    opened = Trackers(BOTH, start_of(folder), flush_seconds=60)
    opened.log_step(step_metrics(0, 0.25))
    opened.log_evaluation(evaluation(1, reward=0.75))
    opened.log_step(step_metrics(1, 0.5))
    opened.close(143)
    for package in BOTH:
        (opening,) = packages.calls(package, "init")
        assert (opening["project"], opening["name"]) == ("verl-server", "sums-1")
        assert opening["config"] == {"grpo.learning_rate": 0.01, "tasks": None}
        assert packages.logged(package) == [(0, 0.25), (1, 0.5)]
        assert packages.logged(package, "evaluation/reward") == [(1, 0.75)]
        assert len(packages.calls(package, "finish")) == 1
    assert packages.calls("wandb", "finish")[0]["exit_code"] == 255, "a signal stopped the run"


def test_trackers_that_are_opened_for_a_context_learn_how_it_ended(packages: FakePackages, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_trackers(("wandb",), start_of(folder)) as opened:
        opened.log_step(step_metrics(0, 0.25))
        raise KeyboardInterrupt
    with open_trackers(("wandb",), start_of(folder)):
        pass
    assert packages.logged("wandb") == [(0, 0.25)]
    assert [call["exit_code"] for call in packages.calls("wandb", "finish")] == [255, 0]


def test_a_resumed_run_goes_on_in_the_same_runs_and_doubles_no_step(packages: FakePackages, folder: Path) -> None:
    log(start_of(folder), 0.0, 0.1, 0.2)
    log(start_of(folder, 1, is_resumed=True), 0.11, 0.21, 0.31)
    for package in BOTH:
        first, second = (opening["run"] for opening in packages.calls(package, "init"))
        assert {call["run"] for call in packages.calls(package, "log")} == {first}
        assert package == "trackio" or second == first
        assert packages.logged(package) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.31)]
    stored = json.loads((folder / "trackers.json").read_text())
    assert {name: known["last"] for name, known in stored.items()} == {name: {"step": 3} for name in BOTH}


def test_a_new_run_in_the_folder_of_another_one_begins_anew(packages: FakePackages, folder: Path) -> None:
    log(start_of(folder), 0.0, names=("wandb",))
    log(start_of(folder), 0.5, names=("wandb",))
    first, second = (call["run"] for call in packages.calls("wandb", "log"))
    assert first != second
    assert json.loads((folder / "trackers.json").read_text())["wandb"]["run"] == second


@pytest.mark.parametrize(
    ("fault", "place", "says"),
    [
        ("raises", "wandb.init", "ConnectionError: nobody answers"),
        ("raises", "wandb.log", "ConnectionError: nobody answers"),
        ("raises", "wandb.finish", "ConnectionError: nobody answers"),
        ("exits", "wandb.init", "SystemExit: log in first"),
    ],
)
def test_a_tracker_that_fails_is_left_out_and_named_once_with_a_remedy(
    packages: FakePackages, folder: Path, fault: str, place: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.break_at(fault, place)
    log(start_of(folder), 0.0, 0.1, 0.2)
    assert packages.logged("trackio") == [(0, 0.0), (1, 0.1), (2, 0.2)], "the other tracker has all steps"
    assert len(packages.calls("trackio", "finish")) == 1
    error = capsys.readouterr().err
    assert error.count("left out") == 1
    assert f"The tracker wandb is left out from now on: {says}." in error
    assert "metrics.jsonl has all steps. Log in with `wandb login`, or set WANDB_MODE=offline" in error


def test_a_tracker_that_hangs_delays_no_other_one_and_the_end_by_its_bound_only(
    packages: FakePackages, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.break_at("hangs", "wandb.log")
    opened = Trackers(BOTH, start_of(folder), flush_seconds=0.5)
    for step in range(3):
        opened.log_step(step_metrics(step))
    assert eventually(lambda: len(packages.logged("trackio")) == 3, seconds=60)
    opened.close(0)
    assert opened._child is not None and opened._child.poll() == 0
    assert "The tracker wandb is left out from now on: it has not written its last figures in time." in (
        capsys.readouterr().err
    )


def test_what_a_tracker_missed_is_logged_when_the_run_goes_on(packages: FakePackages, folder: Path) -> None:
    packages.break_at("raises", "wandb.init")
    log(start_of(folder), 0.0, 0.1)
    packages.repair()
    log(start_of(folder, 2, is_resumed=True), 0.2)
    assert packages.logged("wandb") == [(2, 0.2)]
    assert packages.logged("trackio") == [(0, 0.0), (1, 0.1), (2, 0.2)]


def test_a_package_that_ends_its_process_ends_no_run(
    packages: FakePackages, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packages.break_at("crashes", "wandb.init")
    opened = Trackers(BOTH, start_of(folder), flush_seconds=60)
    assert opened._child is not None
    opened._child.popen.wait(60)
    for step in range(3):
        opened.log_step(step_metrics(step))
    opened.close(0)
    assert [record.message.count("ended with code 7") for record in caplog.records] == [1]


def test_a_process_that_is_stopped_delays_the_end_by_its_bound_only(
    packages: FakePackages, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_EXIT_SECONDS", 0.1)
    opened = Trackers(BOTH, start_of(folder), flush_seconds=0.1)
    assert opened._child is not None
    os.kill(opened._child.pid, signal.SIGSTOP)
    opened.log_step(step_metrics(0))
    opened.close(0)
    assert opened._child.poll() == -signal.SIGKILL
    assert ["did not end in time" in record.message for record in caplog.records] == [True]


def test_figures_that_a_stopped_process_does_not_read_are_bounded(
    packages: FakePackages, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "QUEUED", 4)
    opened = Trackers(BOTH, start_of(folder))
    assert opened._child is not None
    os.kill(opened._child.pid, signal.SIGSTOP)
    for step in range(1000):  # more than a pipe holds
        opened.log_step(step_metrics(step))
    opened.close(0)
    assert ["has not read the last 4 messages" in record.message for record in caplog.records] == [True]
    assert opened._child.poll() is not None


def test_figures_that_a_tracker_does_not_take_are_bounded(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free = threading.Event()
    monkeypatch.setattr(process, "QUEUED", 4)
    monkeypatch.setattr(process, "open_tracker", lambda name, run: is_free.wait(60))
    run = start_of(folder)
    tracker = process.TrackerThread("mlflow", run, EarlierRuns(run))
    for step in range(6):
        tracker.put(Figures("step", step, {"reward/mean": 0.5}))
    tracker.put(RunIsOver(0))
    is_free.set()
    (record,) = caplog.records
    assert "The tracker mlflow is left out from now on: it has not taken the figures of the last 4 steps" in (
        record.message
    )
    assert "MLFLOW_TRACKING_URI" in record.message


def test_a_damaged_record_of_earlier_runs_ends_no_run(
    packages: FakePackages, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "trackers.json").write_text('{"wandb": ')
    log(start_of(folder, 3, is_resumed=True), 0.5)
    assert f"{folder / 'trackers.json'}: " in capsys.readouterr().err


def test_without_names_nothing_starts(folder: Path) -> None:
    log(start_of(folder), 0.5, names=())
    assert list(folder.iterdir()) == []


def test_a_missing_package_and_a_name_that_is_there_twice_are_refused(
    tmp_path: Path, packages: FakePackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_loggers(BOTH)
    with pytest.raises(BadRequestError, match="--logger names a tracker twice: wandb wandb"):
        check_loggers(["wandb", "wandb"])
    (tmp_path / "elsewhere" / "mlflow" / "artifacts").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # a folder of this name is no package
    with pytest.raises(BadRequestError, match=r"--logger mlflow: .*pip install 'verl-server\[mlflow\]'"):
        check_loggers(["wandb", "mlflow"])
