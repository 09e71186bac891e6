"""`--help` of every command says what it does, and what its exit statuses mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.cli.main import main
from verl_server.train import grpo

COMMANDS = [
    "serve",
    "warm-up",
    "rollout",
    "rollout --agent x",
    "trajectories",
    "trajectories repair",
    "env serve",
    "demo",
]


@pytest.mark.parametrize("command", [*COMMANDS, "train.grpo"])
def test_the_exit_statuses_are_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        grpo.main(["--help"]) if command == "train.grpo" else main([*command.split(), "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "Exit status: " in said and "2 for wrong options" in said


@pytest.mark.parametrize("command", ["ls", "show", "stats"])
def test_a_reader_of_runs_takes_a_step(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trajectories", command, "--help"])
    assert "--step" in capsys.readouterr().out


def test_the_help_of_trajectories_has_examples_that_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a demo may have left a run here
    with pytest.raises(SystemExit):
        main(["trajectories", "--help"])
    lines = capsys.readouterr().out.splitlines()
    examples = [
        line.removeprefix("- verl-server ").split("  ")[0] for line in lines if line.startswith("- verl-server ")
    ]
    assert {example.split()[1] for example in examples} == {"ls", "show", "stats", "index", "export", "repair"}
    for example in examples:
        # A wrong option would end the program with status 2. There is no such folder here.
        assert main([word.replace("runs", "/no/such/runs") for word in example.split()]) == 1, example


def test_the_list_of_commands_names_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "python -m verl_server.train.grpo" in said and "exit statuses" in said
