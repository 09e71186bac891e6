"""Each option that docs/options.md names as ours is an option of a trainer: what `--help` of its command prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from verl_server.files.command_options import parse_options
from verl_server.train.options import AsyncTrainArgs, TrainArgs
from verl_server.train.ppo_options import AsyncPPOTrainArgs, PPOTrainArgs

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
_ROW = re.compile(r"^\|(?P<cells>.*)\|$")
_OPTION = re.compile(r"--[a-z0-9][a-z0-9.-]*")


def rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of the page's tables, without those of their heads and rules."""
    found = [_ROW.match(line) for line in page.splitlines()]
    cells = [[cell.strip() for cell in row["cells"].split("|")] for row in found if row is not None]
    return [row for row in cells if row[-1] != "here" and not set("".join(row)) <= set("-")]


def unknown_options(page: str, known: set[str]) -> list[str]:
    """Return the options of the column "here" that are not `known`."""
    return sorted({option for row in rows(page) for option in _OPTION.findall(row[-1])} - known)


@pytest.fixture(scope="module")
def offered() -> set[str]:
    return {option for kind in (TrainArgs, AsyncTrainArgs, PPOTrainArgs, AsyncPPOTrainArgs) for option in help_of(kind)}


def help_of(kind: type[Any]) -> set[str]:
    """Return the options that `--help` of a command prints. Its texts, which name others, are further to the right."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        parse_options(kind, ["--help"], "train")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).splitlines()
    return {option for line in lines if re.match("[│ ] --", line) for option in _OPTION.findall(line)}


def test_options_of_the_page_exist(offered: set[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert unknown_options(page, offered) == []
    assert all(len(row) == 5 and all(row) for row in rows(page)), "a row has a cell for each project"
    assert len([row for row in rows(page) if _OPTION.search(row[-1])]) > 60


def test_an_option_that_does_not_exist_is_found(offered: set[str]) -> None:
    assert {"--grpo.clip-low", "--ppo.gamma", "--max-staleness", "--server.tp-size", "--fork"} <= offered
    page = "| clip | `actor.x` | - | - | `--grpo.clip-lwo`, `--steps` |\n| a | b | c | `--here.not` | `--save-evry` |\n"
    assert unknown_options(page, offered) == ["--grpo.clip-lwo", "--save-evry"]
