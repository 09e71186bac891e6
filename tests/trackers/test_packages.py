"""Each package writes what it was given, goes on in the same run, and fails without consequence."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from reading import READERS, Series, Written, in_fp32

from tests.train.trackers.steps import evaluation, full_step, step_metrics
from verl_server.train.trackers.kinds import REMEDIES, check_loggers
from verl_server.train.trackers.names import CRITIC_LOSSES, EVALUATION_FIGURES, STEP_FIGURES, figures_of_step
from verl_server.train.trackers.tracked_run import TrackedRun
from verl_server.train.trackers.trackers import Trackers

SETTINGS = {"command": "train.grpo", "grpo.learning_rate": 0.015625, "steps": 4, "tasks": None}
NAMES = tuple(READERS)


def open_trackers(out: Path, next_step: int = 0, *, is_resumed: bool = False) -> Trackers:
    return Trackers(NAMES, TrackedRun(str(out), SETTINGS, next_step, is_resumed), flush_seconds=200)


@pytest.fixture(scope="module")
def written(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Log a run that was killed after step 3, and resumed from its checkpoint after step 1."""
    out = tmp_path_factory.mktemp("runs") / "sums"
    out.mkdir()
    first = open_trackers(out)
    for step in range(4):
        if step == 2:
            first.log_evaluation(evaluation(2, reward=0.125))
        first.log_step(step_metrics(step, reward=None if step == 1 else 0.25 * step, losses={"loss": math.nan}))
    first.log_evaluation(evaluation(4, reward=0.25))
    first.close(1)
    second = open_trackers(out, 2, is_resumed=True)
    for step in range(2, 5):
        second.log_step(step_metrics(step, reward=-0.25 * step, age=0.5))
    second.log_evaluation(evaluation(4, reward=0.375))
    second.log_evaluation(evaluation(5, reward=0.5))
    second.close(0)
    return {name: read(out) for name, read in READERS.items()}


def test_all_packages_are_there() -> None:
    check_loggers(NAMES)
    assert REMEDIES.keys() == READERS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_read_back_as_they_were_logged(name: str, written: dict[str, Written]) -> None:
    series = written[name].series
    expected = {*figures_of_step(step_metrics(0)), "age/mean", *EVALUATION_FIGURES}
    assert series.keys() == expected
    assert series["reward/mean"][:1] == [(0, 0.0)]
    assert series["tokens/per_second"] == [(step, 12.5) for step in range(5)]
    assert [step for step, _ in series["policy/loss"]] == list(range(5))
    assert all(math.isnan(loss) for _, loss in series["policy/loss"])
    assert series["evaluation/success"] == [(2, 0.25), (4, 0.25), (5, 0.25)]


def test_each_field_of_a_step_is_read_back(tmp_path: Path) -> None:
    """Also those that are None in some steps, with a gap in their place, and values that are infinite."""
    out = tmp_path / "fields"
    out.mkdir()
    rare = step_metrics(1, reward=None, losses={"loss": math.inf, "new": -math.inf})
    steps = [full_step(0), rare, full_step(2)]
    trackers = open_trackers(out)
    for step in steps:
        trackers.log_step(step)
    trackers.close(0)
    expected: dict[str, Series] = {}
    for step in steps:
        for name, figure in figures_of_step(step).items():
            expected.setdefault(name, []).append((step.step, figure))
    assert {*STEP_FIGURES, *CRITIC_LOSSES, "idle/two", "policy/new"} <= expected.keys()
    assert [at for at, _ in expected["age/mean"]] == [0, 2]
    for name, read in READERS.items():
        assert comparable(name, read(out).series) == comparable(name, expected), name


def comparable(tracker: str, series: dict[str, Series]) -> dict[str, Series]:
    """Return the series as a tracker stores it: TensorBoard in fp32, MLflow with the largest number for infinity."""
    most = sys.float_info.max
    stored = {"tensorboard": in_fp32, "mlflow": lambda value: max(-most, min(most, value))}.get(tracker, float)
    return {name: [(step, stored(value)) for step, value in line] for name, line in series.items()}


def test_steps_that_run_again_replace_those_of_tensorboard(written: dict[str, Written]) -> None:
    series = written["tensorboard"].series
    assert series["reward/mean"] == [(0, 0.0), (2, -0.5), (3, -0.75), (4, -1.0)], "a step without a reward has no point"
    assert series["age/mean"] == [(2, 0.5), (3, 0.5), (4, 0.5)]
    assert series["evaluation/reward"] == [(2, 0.125), (4, 0.375), (5, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_steps_that_run_again_are_not_doubled_elsewhere(name: str, written: dict[str, Written]) -> None:
    series = written[name].series
    assert series["reward/mean"] == [(0, 0.0), (2, 0.5), (3, 0.75), (4, -1.0)]
    assert series["age/mean"] == [(4, 0.5)]
    assert series["evaluation/reward"] == [(2, 0.125), (4, 0.25), (5, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_both_starts_are_one_run_with_the_name_of_the_folder(name: str, written: dict[str, Written]) -> None:
    assert written[name].names == {"sums"} and len(written[name].ids) == 1


def test_settings_and_end_are_those_of_the_run(written: dict[str, Written]) -> None:
    assert written["tensorboard"].settings == written["wandb"].settings == SETTINGS
    assert SETTINGS.items() <= written["trackio"].settings.items()
    texts = {"command": "train.grpo", "grpo.learning_rate": "0.015625", "steps": "4"}
    assert written["mlflow"].settings == texts
    assert (written["wandb"].end, written["mlflow"].end) == ("0", "FINISHED")


def test_packages_that_fail_are_left_out_with_their_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "failing"
    out.mkdir()
    (out / "tensorboard").write_text("a file")
    monkeypatch.setenv("WANDB_MODE", "online")  # without a key
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard port, where nothing listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")  # without a token
    trackers = open_trackers(out)
    trackers.log_step(step_metrics(0))
    trackers.close(0)
    error = capfd.readouterr().err
    for name in NAMES:
        assert error.count(f"The tracker {name} is left out from now on: ") == 1, error
        assert REMEDIES[name] in error
