"""docs/reference holds what `make docs` writes, and agrees with the code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from verl_server.cli import main as cli
from verl_server.rollout.agents.run import arun_agents
from verl_server.server_args import ServerArgs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("generate")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def pages(generate: ModuleType) -> dict[str, str]:
    built: dict[str, str] = generate.build()
    return built


def test_the_committed_pages_are_what_the_generator_writes(pages: dict[str, str]) -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").iterdir()}
    stale = [name for name in sorted(committed.keys() | pages.keys()) if committed.get(name) != pages.get(name)]
    assert not stale, f"docs/reference is stale: {stale}. Run `make docs` and commit the result."


def test_every_route_has_a_heading(generate: ModuleType, pages: dict[str, str]) -> None:
    headings = [line for line in pages["http.md"].splitlines() if line.startswith("### ")]
    for path in {path for operation in generate.mounted_operations() for path in operation.paths}:
        assert any(f"`{path}`" in heading for heading in headings), path


def test_every_setting_has_its_default_and_a_meaning(pages: dict[str, str]) -> None:
    rows = [line.strip("| ").replace("\\|", "").split(" | ") for line in pages["settings.md"].splitlines()]
    settings = {row[0].strip("`"): row for row in rows if len(row) == 5}
    for field in dataclasses.fields(ServerArgs):
        _, flag, _, default, meaning = settings[field.name]
        assert flag == f"`--{field.name.replace('_', '-')}`" and meaning
        if isinstance(field.default, bool | int | float | str):
            assert default.strip("`").replace('"', "'") == repr(field.default), field.name


def test_every_command_and_option_is_described(generate: ModuleType, pages: dict[str, str]) -> None:
    page = pages["commands.md"]
    for name in re.findall(r"^  ([a-z-]+) +\S", cli.USAGE, re.MULTILINE):
        assert re.search(rf"^##+ verl-server {name}\b", page, re.MULTILINE), name
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert list(scripts) == ["verl-server"], "a further program needs a section"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 150 and all(row.split(" | ")[-1].strip("| ") for row in rows), "an option without a meaning"
    for command, (module, name) in generate.COMMANDS.items():
        kind = getattr(importlib.import_module(module), name)
        section = re.split(rf"^##+ {command}$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
        for field in dataclasses.fields(kind):
            flag = field.name.replace("_", "-")
            is_there = f"`--{flag}`" in section or f"`{field.name.upper()}`" in section or f"`--{flag}." in section
            if field.name == "grpo" and command.endswith("ppo"):
                is_there = "`--ppo.groups`" in section
            assert is_there or field.name in ("limits", "faults", "server_urls", "asynchronous"), (command, field.name)
    assert "| `--max-turns` | `int` | `8` |" in page, "the default of the command, not that of the class"


def test_every_extra_says_who_needs_it(generate: ModuleType, pages: dict[str, str]) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for name, packages in extras.items():
        (row,) = [line for line in pages["extras.md"].splitlines() if line.startswith(f"| `{name}` |")]
        assert len(row.split(" | ")[1]) > 20 and all(package.split(";")[0] in row for package in packages)
    with pytest.raises(LookupError, match="has no comment above it"):
        generate.comment_above("[project.optional-dependencies]\nbare = []\n", "bare")


def test_what_agents_are_given_is_described(pages: dict[str, str]) -> None:
    for name in ("run_agents", "AgentLimits", "Server", "AgentSession", "AgentEpisode", "GuardedEnvironment"):
        assert re.search(rf"^## `?{name}`?$", pages["agents.md"], re.MULTILINE), name
    rows = [line for line in pages["agents.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 40 and all(row.split(" | ")[-1].strip("| ") for row in rows), "a field without a meaning"
    options = set(inspect.signature(arun_agents).parameters) - {"agent", "tasks"}
    section = pages["agents.md"].split("## `arun_agents`")[1].split("\n## ")[0]
    said = re.findall(r"`(\w+)`", section)
    assert options <= {*said, "group_size", "retries"}, options - set(said)


def test_links_lead_somewhere(pages: dict[str, str]) -> None:
    headings = {name: re.findall(r"^#+ (.*)$", text, re.MULTILINE) for name, text in pages.items()}
    anchors = {
        name: {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
        for name, found in headings.items()
    }
    for name, text in pages.items():
        for page, anchor in re.findall(r"\]\(([\w.]*)#([\w-]+)\)", text):
            assert anchor in anchors[page or name], f"{name} links to {page}#{anchor}"


def test_a_constructor_with_an_empty_default_is_described(pages: dict[str, str]) -> None:
    assert "### `ToolLoop`" in pages["agents.md"] and "tools: Sequence[Callable[..., Any]] = ()," in pages["agents.md"]
