"""`python -m verl_server.train.ppo` and `async_ppo`: options, two ranks under torchrun, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import run_ranks
from verl_server.train.async_ppo import main as async_main
from verl_server.train.ppo import main
from verl_server.train.ppo_options import AsyncPPOTrainArgs, PPOConfig, PPOTrainArgs

SETTINGS = ["--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu", "--retry-pause", "0"]
SETTINGS += ["--ppo.groups", "16", "--ppo.group-size", "1", "--ppo.minibatches", "1", "--ppo.epochs", "1"]
SETTINGS += ["--ppo.learning-rate", "0.01", "--ppo.critic-learning-rate", "0.01", "--ppo.critic-warmup-steps", "1"]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for flag in ("--critic-path", "--ppo.gae-lambda", "--ppo.value-clip", "--ppo.groups", "--ppo.learning-rate"):
        assert flag in out
    assert "--grpo" not in out
    assert PPOTrainArgs(model_path="m", env_url="http://e").grpo == PPOConfig()
    assert AsyncPPOTrainArgs(model_path="m", env_url="http://e").grpo == PPOConfig(loss="tis")


@pytest.mark.timeout(300)
def test_two_ranks_train_and_one_goes_on(
    policy_folder: Path, server_url: str, environment_url: str, tmp_path: Path
) -> None:
    """The metrics of two ranks are those of one with the same episodes, and one rank resumes the run of two."""
    arguments = ["--model-path", str(policy_folder), "--env-url", environment_url, *SETTINGS, "--ppo.kl-coef", "0.1"]
    launched = ["--server.dtype", "float32", "--server.cpu-threads", "1", "--server.kv-cache-gib", "0.1"]
    one, two = tmp_path / "one", tmp_path / "two"
    log = tmp_path / "log"
    command = [*arguments, *launched, "--steps", "2", "--out", str(two)]
    codes = run_ranks(2, "verl_server.train.ppo", command, log, timeout=140)
    assert codes == [0, 0], log.read_text()[-8000:]
    assert main([*arguments, "--server", server_url, "--steps", "2", "--out", str(one)]) == 0
    both, alone = lines(two / "metrics.jsonl"), lines(one / "metrics.jsonl")
    assert [m["kept"] for m in both] == [m["trainable"] for m in both]
    assert [m["weight_version"].partition("@")[0] for m in both] == ["0", "1"]
    for ours, theirs in zip(both, alone, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3, abs=1e-5)
    assert all("kl_reference" in m["losses"] for m in both)
    assert "loss" not in both[0]["losses"] and {"loss", "value_loss", "explained_variance"} <= both[1]["losses"].keys()
    assert main([*arguments, "--server", server_url, "--steps", "3", "--out", str(two), "--resume"]) == 0
    assert [m["ranks"] for m in lines(two / "metrics.jsonl")] == [2, 2, 1]
    assert (two / "model" / "model.safetensors").exists()


@pytest.mark.timeout(200)
def test_asynchronous_ppo_trains_and_goes_on(
    policy_folder: Path, server_url: str, environment_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Groups play in a process of their own; critic and policy learn from them, before and after an interruption."""
    out = tmp_path / "run"
    command = ["--model-path", str(policy_folder), "--env-url", environment_url, "--server", server_url]
    command += ["--out", str(out), *SETTINGS, "--max-staleness", "1", "--ppo.kl-coef", "0.1", "--ppo.kl-in", "reward"]
    assert async_main([*command, "--steps", "2"]) == 0, capfd.readouterr().err[-6000:]
    assert async_main([*command, "--steps", "3", "--resume"]) == 0, capfd.readouterr().err[-6000:]
    found = lines(out / "metrics.jsonl")
    assert [m["step"] for m in found] == [0, 1, 2] and all(m["age_max"] <= 1 for m in found)
    assert "loss" not in found[0]["losses"]
    assert all("kl_reference" in m["losses"] for m in found)
    assert all({"loss", "truncated_fraction", "explained_variance"} <= m["losses"].keys() for m in found[1:])
    assert json.loads((out / "checkpoint-3" / "run.json").read_text())["further"] == {"critic": True}
