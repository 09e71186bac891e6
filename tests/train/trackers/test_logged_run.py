"""A training run with `--logger`: trackers get what metrics.jsonl has, and a missing package is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.test_train_command import NOWHERE, SETTINGS
from tests.train.trackers.fake_packages import FakePackages
from verl_server.train.grpo import main


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackages:
    folder = tmp_path / "packages"
    folder.mkdir()
    return FakePackages(folder, monkeypatch)


@pytest.mark.usefixtures("real_processes")
def test_trackers_have_the_figures_of_metrics_jsonl_and_one_that_fails_ends_no_run(
    policy_folder: Path, server_url: str, environment_url: str, tmp_path: Path, packages: FakePackages
) -> None:
    out = tmp_path / "first-try"
    where = ["--model-path", str(policy_folder), "--env-url", environment_url, "--server", server_url]
    command = [*where, "--out", str(out), *SETTINGS, "--logger", "wandb", "trackio", "--max-skipped-steps", "9"]
    packages.break_at("raises", "trackio.log")
    assert main([*command, "--steps", "3"]) == 0
    assert main([*command, "--steps", "4", "--resume"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = packages.calls("wandb", "log")
    assert [call["step"] for call in logged] == [line["step"] for line in lines] == [0, 1, 2, 3]
    for call, line in zip(logged, lines, strict=True):
        assert call["figures"].get("reward/mean") == line["reward"]
        assert call["figures"]["time/rollout"] == line["rollout_seconds"]
        losses = {
            name: value for name, value in call["figures"].items() if name.removeprefix("policy/") in line["losses"]
        }
        assert losses == {f"policy/{name}": value for name, value in line["losses"].items()}
    opened = packages.calls("wandb", "init")
    assert [call["name"] for call in opened] == ["first-try"] * 2 and opened[0]["run"] == opened[1]["run"]
    assert opened[0]["config"]["grpo.learning_rate"] == 0.01
    assert [call["exit_code"] for call in packages.calls("wandb", "finish")] == [0, 0]


def test_a_missing_package_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.train.trackers.kinds.is_installed", lambda name: name == "wandb")
    out = tmp_path / "run"
    where = ["--model-path", "absent", "--env-url", NOWHERE, "--out", str(out)]
    assert main([*where, "--logger", "mlflow", "wandb", "trackio"]) == 2
    error = capsys.readouterr().err
    assert "--logger mlflow trackio: not installed here" in error
    assert "pip install 'verl-server[mlflow,trackio]'" in error
    assert not out.exists()
