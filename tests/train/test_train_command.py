"""`python -m verl_server.train.grpo`: options, errors, giving up, resuming, and two ranks under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.torchrun import run_ranks
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.episode import Limits
from verl_server.server_args import ServerArgs
from verl_server.train.grpo import main
from verl_server.train.options import TrainArgs
from verl_server.watch.recorded import read_recorded
from verl_server.watch.run_files import read_events
from verl_server.weight_version import WeightVersion

SETTINGS = ["--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu", "--retry-pause", "0"]
SETTINGS += ["--grpo.groups", "4", "--grpo.group-size", "6", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1"]
NOWHERE = "http://127.0.0.1:9"  # the discard port, where nothing listens


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    settings = ("--model-path", "--env-url", "--grpo.learning-rate", "--observation-key", "--resume", "--max-turns")
    for flag in (*settings, "--env.step", "--generate-timeout", "--server ", "--server.kv-cache-gib"):
        assert flag in out


def test_settings_that_cannot_work_are_refused() -> None:
    def options(**changes: Any) -> TrainArgs:
        return TrainArgs(model_path="m", env_url="http://e", **changes)

    with pytest.raises(BadRequestError, match=r"--rank-timeout 10 must exceed --trajectory-timeout 60"):
        options(rank_timeout=10.0, limits=Limits(trajectory_timeout=60.0))
    with pytest.raises(BadRequestError, match=r"has its own settings: remove --server\.kv-cache-gib"):
        options(server_urls=("http://s",), server=ServerArgs(model_path="", kv_cache_gib=1.0, api_key="key"))
    with pytest.raises(BadRequestError, match="--max-skipped-steps"):
        options(max_skipped_steps=0)
    assert options(server=ServerArgs(model_path="", dtype="float32")).server_settings == {"dtype": "float32"}
    assert options().server_settings == {}


def test_a_wrong_environment_url_is_reported_before_anything_starts(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded before the environment was tried")

    monkeypatch.setattr("verl_server.train.run.load_policy", too_early)
    where = ["--model-path", str(policy_folder), "--out", str(tmp_path / "run")]
    assert main([*where, "--env-url", NOWHERE, *SETTINGS]) == 1
    error = capsys.readouterr().err
    assert f"The environment at --env-url {NOWHERE} cannot be played" in error
    assert "Start the environment server, or correct the URL" in error
    assert "Traceback" not in error


def test_a_damaged_tokenizer_or_model_is_named_by_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.train.run.check_environments", lambda *_: None)
    damaged = make_model_folder(tmp_path / "damaged")
    where = ["--model-path", str(damaged), "--out", str(tmp_path / "run"), "--env-url", NOWHERE]
    for file, loader in (("model.safetensors", "AutoModelForCausalLM"), ("tokenizer.json", "AutoTokenizer")):
        (damaged / file).write_bytes(b"\xff\x00\xfe")
        assert main([*where, *SETTINGS]) == 1
        error = capsys.readouterr().err
        assert f"model_path='{damaged}' cannot be loaded by {loader}" in error.replace("--model-path", "model_path")
        assert "Traceback" not in error


def test_a_wrong_observation_key_is_reported_before_anything_starts(
    policy_folder: Path, environment_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--model-path", str(policy_folder), "--out", str(tmp_path), "--env-url", environment_url]
    assert main([*where, *SETTINGS, "--observation-key", "board"]) == 1
    assert "no text under 'board'; its keys: ['text']" in capsys.readouterr().err


def test_a_run_gives_up_with_everything_saved_and_is_resumed(
    policy_folder: Path,
    server_url: str,
    environment_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    where = ["--model-path", str(policy_folder), "--env-url", environment_url, "--server", server_url]
    command = [*where, "--out", str(out), *SETTINGS]
    # Step 1 fails. One skipped step is the limit, so the run gives up.
    assert main([*command, "--steps", "4", "--max-skipped-steps", "1"]) == 3
    error = capsys.readouterr().err
    assert "Gave up: 1 step(s) in a row had nothing to train on. Step 1: 24 of 24 episodes failed" in error
    assert f"saved in {out}; --resume continues the run" in error
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [0, 1]
    errors = lines(out / "errors.jsonl")
    replaced = [error for error in errors if error["replaced"]]
    assert len(errors) - len(replaced) == 12 + 24 and len(replaced) == 4 + 8  # two in each failing group
    started = next(read_events(out))
    assert errors[0] | {"error": "", "time": started.time} == {
        "incarnation": started.incarnation,
        "time": started.time,
        "step": 0,
        "rank": 0,
        "url": environment_url,
        "stop_reason": "env_error",
        "error": "",
        "seed": 2,
        "group": 2,
        "episode_id": "0-2-0",
        "turns": 0,
        "fault": "infrastructure",
        "attempt": errors[0]["attempt"],
        "replaced": False,
        "environment": None,
    }
    assert "the sandbox is down" in errors[0]["error"]
    assert (out / "checkpoint-2" / "run.json").exists()
    assert (out / "model" / "model.safetensors").exists()

    assert main([*command, "--steps", "4"]) == 1
    assert "already holds a run" in capsys.readouterr().err

    assert main([*command, "--steps", "4", "--resume"]) == 0
    metrics = lines(out / "metrics.jsonl")
    versions = [WeightVersion.parse(line["weight_version"]) for line in metrics]
    assert [version and version.number for version in versions] == [0, 1, 1, 3]
    # The second start is an incarnation of its own: its version 1 is not the one that the first start pushed.
    first, second, third, fourth = (version and version.incarnation for version in versions)
    assert first == second != third == fourth
    written = json.loads((out / "checkpoint-4" / "run.json").read_text())
    assert (written["version"], written["incarnation"]) == (3, fourth)
    assert [line["skipped"] is None for line in metrics] == [True, False, True, False]
    assert all(line["logprob_gap"] < 1e-4 for line in metrics if line["logprob_gap"] is not None)
    recorded = read_recorded(out)
    assert {(r.step, r.name) for r in recorded} == {
        (s, f"{g}-{m}") for s in range(4) for g in range(4) for m in range(6)
    }
    assert len(recorded) == 4 * 24 + len(replaced), "an episode that was replaced is recorded, too"
    kinds = [type(event).__name__ for event in read_events(out)]
    step = ["StepBegan", "PushBegan", "PushEnded", "StepEnded"]
    skipped = ["StepBegan", "StepEnded"]
    first = ["RunStarted", "ServerLaunched", "PushBegan", "PushEnded", *step, *skipped, "CheckpointSaved", "RunEnded"]
    assert kinds == [*first, "RunResumed", *first[1:]]


def _run_ranks(ranks: int, arguments: list[str], out: Path) -> list[dict[str, Any]]:
    log = out.with_suffix(".log")
    codes = run_ranks(ranks, "verl_server.train.grpo", [*arguments, "--out", str(out)], log, timeout=140)
    assert not any(codes) and None not in codes, f"exit codes {codes}: {log.read_text()[-8000:]}"
    return lines(out / "metrics.jsonl")


@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_learns(
    policy_folder: Path, server_url: str, environment_url: str, tmp_path: Path
) -> None:
    """A run on two ranks has the weights and metrics of a run on one rank with the same episodes.

    In step 0 one rank has nothing to train on, and in step 1 neither rank has; no rank waits for the other. One rank
    can resume from the checkpoint of two.
    """
    arguments = ["--model-path", str(policy_folder), "--env-url", environment_url, *SETTINGS]
    launched = ["--server.dtype", "float32", "--server.cpu-threads", "1", "--server.kv-cache-gib", "0.1"]
    one, two = tmp_path / "one", tmp_path / "two"
    both = _run_ranks(2, [*arguments, *launched, "--steps", "3", "--gradient-checkpointing"], two)
    played = [lines(two / f"trajectories-rank{rank}.jsonl") for rank in (0, 1)]
    assert not (two / "trajectories.jsonl").exists()
    for rank, episodes in enumerate(played):
        found = [(e["step"], e["rank"], e["task"]["group"], e["member"]) for e in episodes]
        groups = range(2 * rank, 2 * rank + 2)
        assert set(found) == {(s, rank, g, m) for s in range(3) for g in groups for m in range(6)}
        assert len(found) == 3 * 12 + sum(
            line["replaced"] for line in lines(two / "errors.jsonl") if line["rank"] == rank
        )
    assert main([*arguments, "--server", server_url, "--steps", "3", "--out", str(one)]) == 0
    alone = lines(one / "metrics.jsonl")
    assert [m["skipped"] is None for m in both] == [True, False, True]
    assert [m["ranks"] for m in both + alone] == [2, 2, 2, 1, 1, 1]
    assert all(m["logprob_gap"] < 1e-4 for m in both if m["logprob_gap"] is not None)
    same = ("reward", "trajectories", "failed", "trainable", "kept", "turns", "sampled_tokens", "stop_reasons")
    for name in same:
        assert [m[name] for m in both[:2]] == [m[name] for m in alone[:2]], name
    assert both[0]["losses"] == pytest.approx(alone[0]["losses"], rel=1e-3, abs=1e-5)
    assert {line["rank"] for line in lines(two / "errors.jsonl")} == {0, 1}
    models = [AutoModelForCausalLM.from_pretrained(out / "model").state_dict() for out in (one, two)]
    start = AutoModelForCausalLM.from_pretrained(policy_folder).state_dict()
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-3, atol=1e-4)
        assert not torch.equal(tensor, start[name])
    assert main([*arguments, "--server", server_url, "--steps", "4", "--out", str(two), "--resume"]) == 0
    assert [m["ranks"] for m in lines(two / "metrics.jsonl")] == [2, 2, 2, 1]
