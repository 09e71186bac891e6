"""A mistyped path, URL or import path of any command: one line that names the option and the remedy, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from verl_server.cli.main import main
from verl_server.models.tiny import make_model_folder
from verl_server.train import grpo, run

NOWHERE = "http://127.0.0.1:9"  # the discard port, where nothing listens
MODEL_FAULTS = {
    "/nowhere/model": "does not exist. Set it to a folder",
    "nobody/nothing": "the hub's local cache has no such model. The hub cannot be reached (HF_HUB_OFFLINE is set)",
    "empty": "is not a model: the folder has no config.json",
    "afile": "is a file. Set it to the folder that contains the file",
    "": "is not a model",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `empty` and `afile`, and a hub that is never asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("VERL_SERVER_API_KEY", "key")
    (tmp_path / "empty").mkdir()
    (tmp_path / "afile").write_text("x\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"seed": 1}) + "\n")
    return tmp_path


def refusal(command: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command that ends with status 1. It is one line."""
    capsys.readouterr()
    assert command(argv) == 1
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("20")]  # without the log
    assert len(lines) == 1 and "Traceback" not in error, error
    return lines[0]


@pytest.mark.parametrize("path", list(MODEL_FAULTS))
def test_a_wrong_model_path(place: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = MODEL_FAULTS[path]
    assert said in refusal(grpo.main, ["--model-path", path, "--env-url", NOWHERE, "--device", "cpu"], capsys)
    assert said in refusal(main, ["serve", "--model-path", path, "--device", "cpu"], capsys)
    agent = ["rollout", "--agent", "true", "--tasks", "tasks.jsonl", "--out", "run"]
    error = refusal(main, [*agent, "--model-path", path], capsys)
    assert said in error and "--model-path" in error


@pytest.mark.parametrize("path", ["/nowhere", "nobody/nothing", "empty", "afile"])
def test_a_wrong_tokenizer(place: Path, path: str, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"task": {"seed": 1}, "tokens": [], "turns": []}
    (place / "trajectories.jsonl").write_text(json.dumps(line) + "\n")
    error = refusal(main, ["trajectories", "show", ".", "--tokenizer", path], capsys)
    assert f"--tokenizer='{path}'" in error
    served = ["serve", "--model-path", str(tiny_qwen3), "--device", "cpu", "--port", "0"]
    error = refusal(main, [*served, "--tokenizer-path", path], capsys)
    assert path in error and "--tokenizer-path" in error


PLACES: dict[str, tuple[list[str], str]] = {
    "rollout server": (["rollout", "--server", NOWHERE, "--environment", NOWHERE], f"at --server {NOWHERE}: "),
    "rollout server, no URL": (["rollout", "--server", "ftp://x", "--environment", NOWHERE], "write it as http://"),
    "rollout out, a folder": (
        ["rollout", "--server", NOWHERE, "--environment", NOWHERE, "--out", "empty"],
        "empty is a folder. Name a file",
    ),
    "rollout out below a file": (
        ["rollout", "--server", NOWHERE, "--environment", NOWHERE, "--out", "afile/x"],
        "afile cannot be a folder",
    ),
    "agent module": (["--agent", "nomodule:f"], "name its file: PATH/TO/FILE.py:FUNCTION"),
    "agent file": (["--agent", "nofile.py:f"], "There is no file nofile.py"),
    "agent function": (["--agent", "json:nothing"], "has no function 'nothing'"),
    "agent program": (
        ["--agent", "no-such-program -x"],
        "there is no recipe 'no-such-program', and no program of this name on PATH",
    ),
    "agent tool": (["--agent", "tools", "--tool", "nomodule:f"], "name its file: PATH/TO/FILE.py:FUNCTION"),
    "agent reward": (["--agent", "true", "--reward", "nofile.py:f"], "There is no file nofile.py"),
    "agent tasks": (["--agent", "true", "--tasks", "nofile.jsonl"], "Cannot read nofile.jsonl"),
    "agent server": (["--agent", "true"], "Start a server, or correct its URL"),
    "agent out": (["--agent", "true", "--out", "afile"], "afile cannot be a folder"),
    "agent key": (["--agent", "true", "--api-key-file", "nokey"], "--api-key-file='nokey' cannot be read"),
    "agent environment": (
        ["--agent", "true", "--environment", NOWHERE],
        f"The environment at --environment {NOWHERE} cannot be played",
    ),
    "agent environment, no name": (["--agent", "true", "--environment", "nothing"], "'nothing' is no environment"),
    "env module": (["env", "serve", "nomodule:X"], "name its file: PATH/TO/FILE.py:CLASS"),
    "env key": (["env", "serve", "json:JSONDecoder", "--api-key-file", "nokey"], "'nokey' cannot be read"),
    "demo out": (["demo", "--out", "afile"], "afile cannot be a folder"),
    "trajectories folder": (["trajectories", "ls", "nofolder"], "There is no file nofolder"),
    "trajectories of no run": (["trajectories", "show", "empty"], "There is no file empty/trajectories.jsonl"),
    "session store": (["trajectories", "repair", "nofolder"], "Name the folder of --session-store"),
    "serve key": (["serve", "--model-path", "empty", "--api-key-file", "nokey"], "--api-key-file 'nokey' cannot be"),
    "serve template": (["serve", "--model-path", "MODEL", "--chat-template", "nofile"], "--chat-template: 'nofile'"),
    "serve store": (["serve", "--model-path", "MODEL", "--session-store", "afile"], "--session-store: afile cannot"),
}


@pytest.mark.parametrize("name", list(PLACES))
def test_a_wrong_place(place: Path, name: str, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, said = PLACES[name]
    if argv[0] == "--agent":
        given = dict(zip(argv[::2], argv[1::2], strict=True))
        argv = ["rollout", *argv]
        defaults = {"--tasks": "tasks.jsonl", "--server": NOWHERE, "--out": "run", "--reward": "json:loads"}
        argv += [word for option, value in defaults.items() if option not in given for word in (option, value)]
    argv = [str(tiny_qwen3) if word == "MODEL" else word for word in argv]
    assert said in refusal(main, argv, capsys)


TRAINER: dict[str, tuple[list[str], str]] = {
    "environment": (["--env-url", NOWHERE], f"The environment at --env-url {NOWHERE} cannot be played: "),
    "no URL": (["--env-url", ""], "--env-url: '' is not the URL of an environment server"),
    "server": (["--env-url", NOWHERE, "--server", NOWHERE], f"No rollout server answers at --server {NOWHERE}: "),
    "out": (["--env-url", NOWHERE, "--out", "afile"], "afile cannot be a folder"),
    "resume": (["--env-url", NOWHERE, "--out", "empty", "--resume"], "There is nothing to resume in empty"),
    "program": (
        ["--agent", "no-such-program", "--tasks", "tasks.jsonl"],
        "there is no recipe 'no-such-program', and no program of this name on PATH",
    ),
    "agent": (["--agent", "nomodule:f", "--tasks", "tasks.jsonl"], "PATH/TO/FILE.py:FUNCTION"),
    "tasks": (["--agent", "true", "--tasks", "nofile.jsonl"], "Cannot read nofile.jsonl"),
    "reward": (["--agent", "true", "--tasks", "tasks.jsonl", "--reward", "nofile.py:f"], "no file nofile.py"),
}


@pytest.mark.parametrize("name", list(TRAINER))
def test_a_wrong_place_ends_the_trainer_before_the_model_is_loaded(
    place: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(run, "load_policy", too_early)
    argv, said = TRAINER[name]
    model = make_model_folder(place / "model")
    capsys.readouterr()
    assert said in refusal(grpo.main, ["--model-path", str(model), "--device", "cpu", *argv], capsys)


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing"]) == 2
    error = capsys.readouterr().err
    assert "there is no benchmark 'nothing'" in error and "offline" in error and "gates" in error
