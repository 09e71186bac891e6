"""GRPO with an installed program: the options of a trainer, and short runs in which its program plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bubblewrap import needs_bubblewrap
from tests.rollout.agents import recipe_files
from tests.rollout.agents.recipe_files import script
from tests.train import held_out_agent
from tests.train.test_agent_grpo import FAST, lines
from verl_server.errors import BadRequestError
from verl_server.rollout.agents.installed import ProgramOptions
from verl_server.train import async_grpo, grpo
from verl_server.train.options import TrainArgs

_RECIPE = f"{recipe_files.__file__}:RECIPE"


def command(chat_folder: Path, folder: Path, isolation: str) -> list[str]:
    """Return a short training with the program of `recipe_files`, which asks once."""
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text("".join(f'"{name} {number}"\n' for number in range(2)))
    words = ["--model-path", str(chat_folder), "--out", str(folder / "run"), "--steps", "2", *FAST]
    words += ["--grpo.groups", "2", "--grpo.group-size", "3", "--tasks", str(folder / "train.jsonl")]
    words += ["--agent", _RECIPE, "--program", str(script(folder)), "--isolation", isolation]
    words += ["--reward", f"{held_out_agent.__file__}:share_of_even"]
    return [*words, "--eval-every", "2", "--eval-tasks", "2", "--eval-file", str(folder / "held.jsonl")]


@pytest.mark.timeout(240)
def test_a_program_trains(chat_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert grpo.main(command(chat_folder, tmp_path, "none")) == 0, capfd.readouterr().err
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [(m["trajectories"], m["failed"], m["skipped"]) for m in metrics] == [(6, 0, None)] * 2
    assert all(m["logprob_gap"] < 1e-4 for m in metrics)
    assert [line["episodes"] for line in lines(tmp_path / "run/evaluations.jsonl")] == [2, 2]
    settings = json.loads((tmp_path / "run/run.json").read_text())
    assert settings["program_version"] == "script 1.2.3" and settings["isolation"] == "none"


@needs_bubblewrap
@pytest.mark.timeout(240)
def test_an_isolated_program_trains_asynchronously(
    chat_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rollout process gets the options of the program, and starts bubblewrap while its own memory is hidden."""
    assert async_grpo.main(command(chat_folder, tmp_path, "bubblewrap")) == 0, capfd.readouterr().err
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [(m["trajectories"], m["failed"], m["skipped"]) for m in metrics] == [(6, 0, None)] * 2


def test_options_of_programs_that_do_not_fit_are_refused() -> None:
    def options(**changes: Any) -> TrainArgs:
        return TrainArgs(model_path="m", **changes)

    with pytest.raises(BadRequestError, match="--program, --isolation and --readable are for --agent"):
        options(env_url="http://e", program=ProgramOptions(isolation="none"))
    with pytest.raises(BadRequestError, match="--env-url code is no URL: the built-in loop plays environment servers"):
        options(env_url="code")
    with pytest.raises(BadRequestError, match="--environment code is for the tasks of a file: name it with --tasks"):
        options(agent="tools", env_url="code")
    assert options(agent="tools", env_url="code", tasks="tasks.jsonl").env_url == "code"


def test_a_named_environment_plays_the_tasks_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    from verl_server.train.agent_groups import AgentGroups

    (tmp_path / "tasks.jsonl").write_text('{"seed": 3}\n')
    args = TrainArgs("m", agent="tools", env_url="reasoning-gym:chain_sum", tasks=str(tmp_path / "tasks.jsonl"))
    groups = AgentGroups(args)
    assert groups._environment is not None and groups._reward == "environment"
    assert groups._environment(groups._agent_task(0)).tools == []
