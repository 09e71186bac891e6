"""Names of environments of verifiers, and what cannot be loaded. The package itself: `make test-verifiers`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from verl_server.errors import BadRequestError
from verl_server.rollout.environments import verifiers
from verl_server.rollout.environments.named import environment_named, is_named, is_url
from verl_server.rollout.environments.verifiers import VerifiersEnvironment, VerifiersName, check_alone, parse_name


def test_a_name_has_settings_and_those_of_held_out_tasks() -> None:
    assert parse_name("verifiers:gsm8k-v1") == VerifiersName("gsm8k-v1")
    text = 'verifiers:owner/maze?{"taskset": {"url": "http://h?x=1"}, "eval": {"taskset": {"split": "test"}}}'
    block, held_out = {"taskset": {"url": "http://h?x=1"}}, {"taskset": {"split": "test"}}
    assert parse_name(text) == VerifiersName("owner/maze", block, held_out)
    assert is_named(text) and not is_url(text)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("verifiers:", "no name behind the colon"),
        ("verifiers:?{}", "no name behind the colon"),
        ("verifiers:maze?", "is no JSON"),
        ("verifiers:maze?split=test", "is no JSON"),
        ("verifiers:maze?[1]", "must be objects"),
        ('verifiers:maze?{"taskset": "test"}', "must be objects"),
        ('verifiers:maze?{"eval": 3}', "eval: the settings"),
    ],
)
def test_a_wrong_name_is_refused_with_an_example(text: str, cause: str) -> None:
    with pytest.raises(BadRequestError, match=cause) as error:
        parse_name(text)
    assert 'verifiers:NAME?{"taskset": {"split": "train"}}' in str(error.value)


def test_it_is_no_environment_of_another_agent() -> None:
    with pytest.raises(BadRequestError, match="name it with --tasks, and no --agent"):
        environment_named("verifiers:maze")
    check_alone(agent=None, tool=())
    with pytest.raises(BadRequestError, match="--eval-file cannot be combined with --tasks verifiers:NAME"):
        check_alone(agent=None, eval_file="x.jsonl")


def test_a_missing_package_and_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(verifiers, "version", missing)
    with pytest.raises(BadRequestError, match=r"need the package: pip install 'verl-server\[verifiers\]'"):
        VerifiersEnvironment("maze", {})
    monkeypatch.setattr(verifiers, "version", lambda name: "0.1.14")
    with pytest.raises(BadRequestError, match=r"verifiers 0.1.14 is installed, .* pip install"):
        VerifiersEnvironment("maze", {})


def test_an_environment_for_an_earlier_verifiers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> Any:
        raise ModuleNotFoundError("no module")

    old = SimpleNamespace(load_environment=lambda: None)
    monkeypatch.setattr(verifiers, "version", lambda name: "0.4.0")
    for found, cause in (
        (lambda name: old, "written for verifiers before 0.4"),
        (no_module, "prime env install OWNER/maze"),
    ):
        monkeypatch.setattr(verifiers, "_api", lambda found=found: SimpleNamespace(import_taskset=found))
        with pytest.raises(BadRequestError, match=cause):
            VerifiersEnvironment("maze", {})
