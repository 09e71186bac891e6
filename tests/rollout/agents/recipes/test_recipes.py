"""Every recipe of the folder satisfies the rules, and reads the answer of its program."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
from dataclasses import replace
from pathlib import Path

import pytest

from verl_server.rollout.agents import recipes
from verl_server.rollout.agents.recipes import aider, mini_swe_agent, opencode, openhands, smolagents
from verl_server.rollout.agents.recipes.recipe import Place, Recipe

NAMES = sorted({module.name for module in pkgutil.iter_modules(recipes.__path__)} - {"recipe", "python_script"})
KEY = "vs-the-key-of-this-session"
PROMPT = '- Fix `add` in calc.py.\n\n"It" must not contain {braces} or $variables: 100 %.\nEnd.'
PLACE = Place(
    program="/opt/tool/bin/program",
    prompt=PROMPT,
    home=Path("/episode/home"),
    workspace=Path("/episode/workspace"),
    openai_url=f"http://127.0.0.1:4000/s/{KEY}/v1",
    anthropic_url=f"http://127.0.0.1:4000/s/{KEY}",
    key=KEY,
    model="policy",
    context=65_536,
    max_output=None,
    max_turns=None,
    seconds=1234.5,
)
PATH = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)*[\w.-]+")
"""An absolute path in a word, a variable or a setting."""
WITHOUT_BOUND = {"codex"}
"""Programs that have no setting for the tokens of a reply. The session has the bound."""


def recipe(name: str) -> Recipe:
    return importlib.import_module(f"{recipes.__name__}.{name}").RECIPE  # type: ignore[no-any-return]


def read_nothing(name: str) -> str | None:
    return None


def answer(recipe: Recipe, stdout: str = "", **files: str) -> str:
    named = {name.replace("_", "."): text for name, text in files.items()}
    return recipe.answer(stdout, named.get)


def test_all_programs_have_a_recipe() -> None:
    assert set(NAMES) >= {"aider", "mini_swe_agent", "opencode", "openhands", "smolagents"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_its_program_its_versions_and_how_to_install_it(name: str) -> None:
    r = recipe(name)
    assert re.fullmatch(r"[a-z][a-z0-9-]*", r.program)
    assert re.match(r"(pip|npm|uv|pipx|cargo|curl|apt) ", r.install)
    assert re.match(r"\d+\.\d+", r.versions)
    assert r.version and 0 <= r.least_context <= 32_768


@pytest.mark.parametrize("max_output", [None, 777])
@pytest.mark.parametrize("name", NAMES)
def test_a_command_has_the_session_the_prompt_and_nothing_outside(name: str, max_output: int | None) -> None:
    start = recipe(name).start(replace(PLACE, max_output=max_output))
    words = list(start.argv)
    assert words[0] == PLACE.program  # the isolation shows its installation
    assert KEY not in " ".join(words)
    places = [*words, *start.env.values(), *start.files.values()]
    everything = "\n".join(places)
    assert PLACE.openai_url in everything or PLACE.anthropic_url in everything
    assert KEY in start.env.values()
    assert "policy" in everything
    assert max_output is None or name in WITHOUT_BOUND or str(max_output) in everything

    # The prompt reaches the program whole, and never as a word that may be an option or too long.
    assert not any(PROMPT in word for word in words)
    prompts = [start.stdin, *start.files.values()]
    assert any(text is not None and (text == PROMPT or json.dumps(PROMPT) in text) for text in prompts)

    assert all(not Path(file).is_absolute() and ".." not in Path(file).parts for file in start.files)
    own = (str(PLACE.home), str(PLACE.workspace), PLACE.program)
    settings = [text for file, text in start.files.items() if file.endswith((".json", ".yaml", ".yml", ".toml"))]
    texts = [text.replace(json.dumps(PROMPT), "") for text in [*words, *start.env.values(), *settings]]
    named = [path for text in texts for path in PATH.findall(text)]
    assert [path for path in named if not path.startswith(own)] == []
    assert not {"PATH", "HOME", "TMPDIR", "LANG"} & set(start.env)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_a_command_names_below_home_are_written_or_the_program_writes_them(name: str) -> None:
    start = recipe(name).start(PLACE)
    scripts = [word for word in start.argv if word.endswith((".py", ".yaml", ".yml", ".json", ".md", ".txt"))]
    below = [Path(word).relative_to(PLACE.home) for word in scripts if word.startswith(str(PLACE.home))]
    written_by_program = {"trajectory.json", "replies.txt", "chat.md", "input.txt", "answer.txt"}
    assert {str(path) for path in below} <= {*start.files, *written_by_program}
    for file, text in start.files.items():
        if file.endswith(".py"):
            ast.parse(text)
        elif file.endswith((".json", ".yaml", ".yml")):
            json.loads(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_was_killed_has_no_answer(name: str) -> None:
    assert recipe(name).answer("", read_nothing) == ""


@pytest.mark.parametrize("name", NAMES)
def test_no_output_of_a_program_makes_answer_fail(name: str) -> None:
    for text in ("[]", "null", "3", '{"type"', "{}", '{"messages": [1], "info": null}', '{"type": "text", "part": 1}'):
        assert isinstance(recipe(name).answer(text, lambda file, text=text: text), str)


def test_a_timer_of_javascript_does_not_overflow() -> None:
    start = opencode.RECIPE.start(replace(PLACE, seconds=1e9))
    settings = json.loads(start.files["opencode.json"])
    assert settings["provider"]["verl"]["options"]["headerTimeout"] == 2**31 - 1


def test_opencode_leaves_room_for_the_prompt() -> None:
    settings = json.loads(opencode.RECIPE.start(replace(PLACE, context=16_384)).files["opencode.json"])
    limit = settings["provider"]["verl"]["models"]["policy"]["limit"]
    assert limit == {"context": 16_384, "output": 4_096}


def test_the_answer_of_opencode_is_the_text_of_the_last_step() -> None:
    events = [
        {"type": "step_start", "part": {"id": "a"}},
        {"type": "text", "part": {"text": "I look."}},
        {"type": "tool_use", "part": {"tool": "bash"}},
        {"type": "step_start", "part": {"id": "b"}},
        {"type": "text", "part": {"text": "Fixed."}},
        {"type": "text", "part": {"text": "All tests pass."}},
    ]
    lines = ["a line of a log", *map(json.dumps, events), '{"type": "text", "pa']
    assert answer(opencode.RECIPE, "\n".join(lines)) == "Fixed.\nAll tests pass."


def test_the_answer_of_mini_is_its_submission_else_its_last_text() -> None:
    def trajectory(submission: str) -> str:
        messages = [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": "I look.", "tool_calls": []},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "exit", "content": submission},
        ]
        return json.dumps({"info": {"submission": submission}, "messages": messages})

    assert answer(mini_swe_agent.RECIPE, trajectory_json=trajectory("a patch")) == "a patch"
    assert answer(mini_swe_agent.RECIPE, trajectory_json=trajectory("")) == "I look."


def test_the_answer_of_aider_is_its_last_reply() -> None:
    replies = (
        "TO LLM 2026-01-01T00:00:00\n-------\nUSER Fix it.\nLLM RESPONSE 2026-01-01T00:00:01\nASSISTANT First.\n"
        "TO LLM 2026-01-01T00:00:02\n-------\nASSISTANT First.\n-------\nUSER More.\n"
        "LLM RESPONSE 2026-01-01T00:00:03\nASSISTANT calc.py\nASSISTANT \nASSISTANT ASSISTANT x = 1\n"
        "TO LLM 2026-01-01T00:00:04\n-------\nASSISTANT First.\n"
    )
    assert answer(aider.RECIPE, replies_txt=replies) == "calc.py\n\nASSISTANT x = 1"


@pytest.mark.parametrize("module", [smolagents, openhands])
def test_the_answer_of_a_script_is_in_its_file(module: object) -> None:
    assert answer(module.RECIPE, "a log", answer_txt="42") == "42"  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [smolagents, openhands])
def test_a_script_reads_only_variables_that_the_recipe_sets(module: object) -> None:
    start = module.RECIPE.start(PLACE)  # type: ignore[attr-defined]
    read = set(re.findall(r'os\.environ\["(\w+)"\]', start.files["agent.py"]))
    assert read <= {*start.env, "HOME"}
