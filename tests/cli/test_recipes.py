"""`verl-server rollout --agent` with the recipe of an installed program."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bubblewrap import needs_bubblewrap
from tests.cli.test_agents import fake, folder  # noqa: F401 (fixtures)
from tests.rollout.agents import recipe_files
from tests.rollout.agents.recipe_files import script
from tests.rollout.fake_sessions import FakeServer
from verl_server.cli.main import main
from verl_server.errors import BadRequestError
from verl_server.rollout.agents.installed import InstalledAgent, ProgramOptions
from verl_server.rollout.agents.loading import load_agent, recipe_names

_RECIPE = f"{recipe_files.__file__}:RECIPE"


def test_a_run_of_a_recipe_in_a_file(fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    program = script(folder)
    (folder / "numbers.jsonl").write_text('"say 4"\n"say 5"\n')
    (folder / "judge.py").write_text("def right(episode):\n    return float(episode.result in episode.task.input)\n")
    command = ["rollout", "--agent", f"{_RECIPE} --extra 'a b'", "--program", str(program), "--isolation", "none"]
    command += ["--tasks", "numbers.jsonl", "--reward", "judge.py:right", "--server", fake.url, "--out", "runs/r"]
    assert main([*command, "--max-new-tokens", "7"]) == 0
    said = capsys.readouterr().out
    assert f"Agent: recipe {_RECIPE}, script 1.2.3 ({program}), without isolation." in said
    assert "mean reward 1.000" in said
    settings = json.loads((folder / "runs/r/run.json").read_text())
    assert settings["agent"] == [_RECIPE, "--extra", "a b"] and settings["sampling_params"]["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--agent", "codex", "--program", "/no/such/codex", "--reward", "x:y"], "there is none at /no/such/codex"),
        (["--agent", "python x.py", "--program", "/bin/true"], "a command names its program itself"),
        (["--agent", "python x.py", "--readable", "/opt"], "--readable needs --isolation bubblewrap"),
        (["--agent", "my_agent.py:play", "--isolation", "none"], "--isolation is for agents that are programs"),
        (["--agent", "tools", "--program", "/bin/true"], "--program is for agents that are programs"),
        (["--agent", "codex --x", "--tool", "a:b"], "--tool and --system are for --agent tools"),
        (["--agent", "codex 'x"], "is not a command"),
        (["--agent", "no-such-recipe"], "no recipe 'no-such-recipe'"),
        (["--agent", _RECIPE, "--program", "SCRIPT", "--isolation", "none"], "--reward is needed"),
        (
            ["--agent", _RECIPE, "--program", "SCRIPT", "--isolation", "none", "--reward", "exit"],
            "exits with 0 whatever",
        ),
        pytest.param(
            ["--agent", _RECIPE, "--program", "SCRIPT", "--isolation", "none", "--environment", "code"],
            "has tools only",
            marks=needs_bubblewrap,  # so does the environment
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_remedy(
    fake: FakeServer,  # noqa: F811
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    words = [str(script(folder)) if word == "SCRIPT" else word for word in words]
    assert main(["rollout", *words, "--tasks", "tasks.jsonl", "--server", fake.url, "--out", "runs/e"]) == 1
    assert says in capsys.readouterr().err


def test_a_bad_isolation_ends_with_the_status_of_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--isolation", "none", "--readable", "/opt"]
    assert main(["rollout", "--agent", "codex", "--tasks", "t", "--out", "o", *options]) == 2
    assert "without isolation, all is readable" in capsys.readouterr().err


def test_a_game_of_several_steps_is_refused() -> None:
    from verl_server.rollout.agents.loading import check_playable

    agent = load_agent("codex")
    with pytest.raises(BadRequestError, match="a game of several steps"):
        check_playable(agent, "textarena:GuessTheNumber-v0", None)
    check_playable(agent, "reasoning-gym:chain_sum", None)


@pytest.mark.parametrize("command", ["rollout --agent x", "rollout"])
def test_the_help_names_the_recipes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    said = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert recipe_names() and all(name in said for name in recipe_names())


def test_each_recipe_is_found_by_its_name_and_starts_its_program(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 1.0\n")
    program.chmod(0o755)
    for name in recipe_names():
        agent = load_agent(f"{name} --more words", program=ProgramOptions(program=str(program), isolation="none"))
        assert isinstance(agent, InstalledAgent) and agent.words == ["--more", "words"]
        assert agent.recipe.install and agent.recipe.versions
        agent = replace(agent, recipe=replace(agent.recipe, needs=()))
        if agent.recipe.takes_words:
            agent.check()
        else:
            with pytest.raises(BadRequestError, match="has no options: leave '--more' out"):
                agent.check()


def test_a_program_at_a_path_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_agent("./codex exec") == ["./codex", "exec"] and os.getcwd() == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("claude -p", "the program of the recipe claude-code: write --agent claude-code"),
        ("claude_code", r"Did you mean --agent claude-code\?"),
        ("codx exec", r"no recipe 'codx'.*Did you mean --agent codex\?.*aider, claude-code"),
        ("no-such-program", "no recipe 'no-such-program', and no program of this name on PATH"),
    ],
)
def test_a_recipe_by_another_name_is_not_run_as_a_command(text: str, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        load_agent(text)
    assert load_agent("python agent.py") == ["python", "agent.py"]
