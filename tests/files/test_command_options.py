"""An option with a wrong value is named as the command has it, wherever the class of options is nested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import tyro

from verl_server.cli.agents import AgentRolloutArgs
from verl_server.cli.main import main
from verl_server.cli.rollout import RolloutArgs
from verl_server.errors import BadRequestError
from verl_server.files.command_options import OptionError, as_options, option_names, parse_options
from verl_server.train import grpo
from verl_server.train.options import TrainArgs


@dataclass(frozen=True)
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise BadRequestError(f"Inner.size must be at least 1, not {self.size} (Inner.sizes, Other.size).")


@dataclass(frozen=True)
class Outer:
    own: Annotated[Inner, tyro.conf.arg(name="")] = field(default_factory=Inner)
    count: Annotated[int, tyro.conf.arg(name="number_of")] = 0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise BadRequestError("Outer.count must not be negative.")


@dataclass(frozen=True)
class Nested:
    in_it: Inner = field(default_factory=Inner)
    extra: dict[str, Any] = field(default_factory=dict)


def test_options_are_named_as_the_command_has_them() -> None:
    assert parse_options(Outer, ["--size", "3"], "prog") == Outer(Inner(3))
    assert parse_options(Nested, ["--in-it.size", "3", "--extra", '{"a": 1}'], "prog") == Nested(Inner(3), {"a": 1})
    cases: list[tuple[type[Any], list[str], str]] = [
        (Outer, ["--size", "0"], "--size must be at least 1, not 0 (Inner.sizes, Other.size)."),
        (Outer, ["--number-of", "-1"], "--number-of must not be negative."),
        (Nested, ["--in-it.size", "0"], "--in-it.size must be at least 1, not 0 (Inner.sizes, Other.size)."),
    ]
    for kind, argv, said in cases:
        with pytest.raises(OptionError) as caught:
            parse_options(kind, argv, "prog")
        assert str(caught.value) == said


def test_a_value_that_cannot_be_read_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(Outer, ["--size", "x"], "prog")
    assert caught.value.code == 2 and "--size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RolloutArgs, {"Limits.max_turns": "--max-turns", "EnvTimeouts.connect": "--env.connect"}),
        (AgentRolloutArgs, {"AgentLimits.max_turns": "--limits.max-turns"}),
        (TrainArgs, {"GRPOConfig.group_size": "--grpo.group-size", "ServerArgs.port": "--server.port"}),
        (TrainArgs, {"Limits.max_turns": "--max-turns", "TrainArgs.server_urls": "--server"}),
    ],
)
def test_the_options_of_commands(kind: type[Any], expected: dict[str, str]) -> None:
    names = option_names(kind)
    assert expected.items() <= names.items()
    assert as_options("Limits.max_turns, Limits.other and a.b", names).endswith("Limits.other and a.b")


ROLLOUT = ["rollout", "--server", "http://s", "--environment", "http://e"]
AGENT = ["rollout", "--agent", "true", "--tasks", "t.jsonl", "--out", "run"]
TRAINER = ["--model-path", "m", "--env-url", "http://e"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*ROLLOUT, "--max-turns", "0"], "--max-turns must be at least 1, not 0."),
        ([*ROLLOUT, "--env.connect", "0"], "--env.connect must be more than 0 seconds, not 0.0."),
        ([*ROLLOUT, "--temperature", "-1"], "--temperature must be finite"),
        ([*ROLLOUT, "--group-size", "0"], "--group-size must be at least 1, not 0."),
        ([*AGENT, "--limits.max-turns", "0"], "--limits.max-turns must be at least 1, not 0."),
        ([*AGENT, "--limits.seconds", "0"], "--limits.seconds must be more than 0 seconds, not 0.0."),
        ([*TRAINER, "--straggler-fraction", "3"], "--straggler-fraction must be in (0, 1], not 3.0."),
        ([*TRAINER, "--grpo.groups", "0"], "--grpo.groups must be at least 1, not 0."),
        ([*TRAINER, "--server.port", "-1"], "--server.port must be in 0..65535, not -1."),
        ([*TRAINER, "--steps", "0"], "--steps, --max-skipped-steps and --logprob-chunk must be at least 1."),
        (["demo", "--steps", "0"], "--steps, --episodes and --pace-episodes must be at least 1"),
        ([*ROLLOUT, "--episodes", "4"], "--episodes was removed. Use --groups N"),
        ([*AGENT, "--episodes=4"], "--episodes was removed. Use --groups N"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = grpo.main if argv[0].startswith("--") else main
    assert command(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f": {said}" in error
