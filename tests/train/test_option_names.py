"""Messages name an option as the user typed it: --ppo.NAME for PPO, and no name of a class or a field."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_server.errors import BadRequestError
from verl_server.files.run_output import store_settings
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.ppo_options import AsyncPPOTrainArgs, PPOConfig, PPOTrainArgs
from verl_server.train.run_folder import RunFolder
from verl_server.train.run_settings import run_settings
from verl_server.watch.advisories import Advisor
from verl_server.watch.advisory_rules.figures import Past, RunSettings

SOURCES = sorted((Path(__file__).parents[2] / "verl_server" / "train").rglob("*.py"))
BAD = (-1, 0, math.nan, math.inf, 1.5, (2.0, 1.0))


def refusals(kind: type[GRPOConfig]) -> Iterator[tuple[str, str]]:
    """Yield (field, message) of each bad value that the settings refuse."""
    for field in dataclasses.fields(kind):
        for value in BAD:
            try:
                kind(**{field.name: value})
            except BadRequestError as error:
                yield field.name, str(error)
            except TypeError:
                pass  # the command line refuses a value of another type


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
def test_a_refused_setting_is_named_as_it_was_typed(kind: type[GRPOConfig]) -> None:
    found = list(refusals(kind))
    assert {"groups", "temperature", "correction_bound", "tis_bound", "token_mask"} <= {name for name, _ in found}
    for name, message in found:
        assert f"--{kind.option}.{name.replace('_', '-')}" in message, message
        assert "Config" not in message, message
        other = {"grpo": "--ppo", "ppo": "--grpo"}[kind.option]
        assert other not in message, message


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module without its docstrings: those are the help of GRPO's options."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_no_message_of_the_trainers_has_the_option_of_one_algorithm() -> None:
    found = {
        f"{path.name}: {text}"
        for path in SOURCES
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if "--grpo." in text or "Config." in text
    }
    assert found == set()
    critic = {path.name for path in SOURCES if any("--ppo." in t for t in texts(ast.parse(path.read_text())))}
    assert critic == {"finite_check.py"}, "the message about the critic, which only PPO has"


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (TrainArgs("m", env_url="http://e"), "grpo"),
        (PPOTrainArgs("m", env_url="http://e"), "ppo"),
        (AsyncPPOTrainArgs("m", env_url="http://e"), "ppo"),
    ],
)
def test_a_setting_that_differs_is_named_as_it_was_typed(tmp_path: Path, args: TrainArgs, name: str) -> None:
    settings = run_settings(args)
    (tmp_path / "checkpoint-1").mkdir()
    store_settings(tmp_path / "run.json", settings | {"grpo.temperature": 0.5})
    with pytest.raises(BadRequestError, match=rf"\({name}\.temperature: was 0\.5, is 1\.0\)"):
        RunFolder(tmp_path, lambda: settings).open(resume=True)


@pytest.mark.parametrize(("command", "option"), [("train.grpo", "grpo"), ("train.async_ppo", "ppo"), (None, "grpo")])
def test_an_advisory_names_the_options_of_its_run(command: str | None, option: str) -> None:
    advisor = Advisor(past=Past(RunSettings.of({"command": command})))
    line: dict[str, Any] = {"step": 0, "reward": 0.5, "losses": {"behaviour_kl": 5.0}}
    news = [advisory for step in range(3) for advisory in advisor.judge(line | {"step": step}, {})]
    assert [advisory.name for advisory in news] == ["behaviour_kl"]
    text = news[0].describe()
    assert f"--{option}.learning-rate" in text and (option == "grpo" or "--grpo" not in text)
