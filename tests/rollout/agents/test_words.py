"""Words behind a recipe's name: those that contradict the recipe are refused in every spelling, and others are not."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import replace

import pytest

from tests.rollout.agents.recipes.test_recipes import NAMES, PLACE
from verl_server.errors import BadRequestError
from verl_server.rollout.agents import recipes
from verl_server.rollout.agents.words import check_words

_ARGV = ["/bin/x", "exec", "--format", "json", "--no-stream", "-C", "/w", "-c", "a.yaml", "-"]
_RESERVED = ["-m", "--model", "-c model.name", "--config model.name", "-c tools"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        *(("--format text", "--format"), ("--format=text", "--format"), ("--no-format", "--no-format")),
        *(("--stream", "--stream"), ("--x 1 -C /", "-C"), ("-C/", "-C")),
        *(("-m x", "-m"), ("-mx", "-m"), ("-m=x", "-m"), ("--model=x", "--model")),
        *(("-c model.name=x", "-c model.name"), ("-cmodel.name=x", "-c model.name"), ("-c=model={}", "-c model")),
        *(("--config=model.name.part=x", "--config model.name.part"), ("-c tools.web=1", "-c tools.web")),
    ],
)
def test_an_option_of_the_recipe_is_refused_in_each_spelling(words: str, option: str) -> None:
    with pytest.raises(BadRequestError, match=f"'{option}' is an option that the recipe r sets itself"):
        check_words("r", shlex.split(words), _ARGV, _RESERVED)


@pytest.mark.parametrize(
    "words",
    [
        *("--tools Bash", "--formats x", "--stream-to x", "-x", "-", "-5", "exec text", "-- --format text"),
        *("-c model.names=x", "-c model.other=x", "-c b.yaml", "-c", "--config tools=1", "-c toolset=1"),
    ],
)
def test_other_words_are_not_refused(words: str) -> None:
    check_words("r", shlex.split(words), _ARGV, _RESERVED)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_a_word_with_which_the_program_plays_nothing_is_refused(word: str) -> None:
    with pytest.raises(BadRequestError, match=f"plays nothing. Run `/bin/x {word}` yourself"):
        check_words("r", [word], _ARGV, [])


_REFUSED = {
    "claude_code": ["--model opus", "--print", "--output-format=text", "--max-turns 3", "-p", "--permission-mode plan"],
    "codex": [
        *("-m o3", "--model=o3", "-c model=o3", "--config model=o3", "-c model_providers.verl.base_url=http://x"),
        *("-c model_providers={}", "--enable goals", "--disable=goals", "-c features.goals=true", "-p mine"),
        *("--sandbox read-only", "-o x", "--output-last-message x", "--cd /", "--ignore-user-config", "--oss"),
    ],
    "aider": [
        "--model x",
        "--stream",
        "--git",
        "--no-git",
        "--message x",
        "-m x",
        "--openai-api-base x",
        "--timeout 1",
    ],
    "opencode": ["-m x/y", "--model x/y", "--title x", "--format default", "--continue"],
    "mini_swe_agent": ["-m x", "-c model.model_name=x", "-c run.task=x", "--config agent.mode=human", "-t x", "-o x"],
}
_TAKEN = {
    "claude_code": ["--tools Bash --system-prompt 'Answer.'", "--append-system-prompt x", "--json-schema {}", "--bare"],
    "codex": ["-c model_instructions_file=/x", "-c model_reasoning_effort=low", "--enable other", "--output-schema x"],
    "aider": ["--test-cmd make --auto-test", "--map-tokens 0", "--edit-format diff"],
    "opencode": ["--agent build", "--variant high"],
    "mini_swe_agent": ["-c agent.step_limit=10", "-c model.model_kwargs.temperature=0", "-c own.yaml"],
}


def _check(name: str, words: str) -> None:
    recipe = importlib.import_module(f"{recipes.__name__}.{name}").RECIPE
    start = recipe.start(replace(PLACE, max_turns=5, max_output=100))
    check_words(name, shlex.split(words), start.argv, recipe.reserved)


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, all_of in _REFUSED.items() for words in all_of])
def test_a_recipe_refuses_other_addresses_models_limits_and_answers(name: str, words: str) -> None:
    with pytest.raises(BadRequestError, match="sets itself"):
        _check(name, words)


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, all_of in _TAKEN.items() for words in all_of])
def test_a_recipe_takes_other_options(name: str, words: str) -> None:
    _check(name, words)


def test_each_recipe_has_its_words_tested_or_takes_none() -> None:
    modules = {name: importlib.import_module(f"{recipes.__name__}.{name}") for name in NAMES}
    assert {name for name, module in modules.items() if module.RECIPE.takes_words} == _REFUSED.keys() == _TAKEN.keys()
