"""docs/reference holds what `make docs` writes, and agrees with the code."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_links_lead_somewhere(pages: dict[str, str]) -> None:
    headings = {name: re.findall(r"^#+ (.*)$", text, re.MULTILINE) for name, text in pages.items()}
    anchors = {
        name: {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
        for name, found in headings.items()
    }
    for name, text in pages.items():
        for page, anchor in re.findall(r"\]\(([\w.]*)#([\w-]+)\)", text):
            assert anchor in anchors[page or name], f"{name} links to {page}#{anchor}"
