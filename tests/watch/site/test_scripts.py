"""The page's scripts: Node checks their syntax and runs the tests of their pure functions, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[3] / "verl_server/watch/site/static"
SCRIPTS = sorted((STATIC / "js").glob("*.js"))
OWN = [script for script in SCRIPTS if script.name != "uplot.js"]
NODE = shutil.which("node")
CHECK = """
const { readFileSync } = require("node:fs");
const { basename } = require("node:path");
const { SourceTextModule } = require("node:vm");
for (const file of process.argv.slice(1)) {
  new SourceTextModule(readFileSync(file, "utf8"), { identifier: file });
  console.log(basename(file));
}
"""
"""Parses the modules in one process. Their code does not run."""


def run_node(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    return subprocess.run([NODE, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(NODE is None, reason="Node is not installed.")
def test_node_accepts_each_script() -> None:
    checked = run_node("--experimental-vm-modules", "--no-warnings", "-e", CHECK, *map(str, SCRIPTS))
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.split() == [script.name for script in SCRIPTS]


@pytest.mark.skipif(NODE is None, reason="Node is not installed.")
def test_pure_functions_of_the_scripts() -> None:
    tests = sorted(str(file) for file in (Path(__file__).parent / "js").glob("*.test.js"))
    result = run_node("--test", *tests)
    assert result.returncode == 0, result.stdout[-8000:]
    passed = re.search(r"# pass (\d+)", result.stdout)
    assert passed is not None and int(passed[1]) >= len(tests)


@pytest.mark.parametrize("script", OWN, ids=lambda script: script.stem)
def test_scripts_set_text_alone_and_are_not_long(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith("/**\n * "), "A module opens with what it owns, and who calls it."
    for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert door not in text, f"{door} can make markup or code of a text."
    assert "http://" not in text and "https://" not in text, "The page loads nothing from elsewhere."
    assert len(text.splitlines()) <= 420


def test_the_page_has_no_inline_code_or_style() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", page)
    for path in re.findall(r'(?:href|src)="/static/([^"]+)"', page):
        assert (STATIC / path).is_file(), path


def test_the_chart_library_has_its_licence() -> None:
    assert "MIT License" in (STATIC / "uplot/LICENSE").read_text(encoding="utf-8")
    assert "1.6.32" in (STATIC / "uplot/README.md").read_text(encoding="utf-8")
    assert "1.6.32" in (STATIC / "js/uplot.js").read_text(encoding="utf-8")[:200]
