"""Each invariant of the design, broken on purpose in a copy of the code: tests of `make test` must notice.

A break replaces one passage of one module. A break whose passage is gone fails, too: write it anew. Every break names
the tests that should catch it, so that a run takes seconds; they are all part of `make test`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Break:
    invariant: str
    module: str
    """Path below the package."""
    old: str
    """Passage that occurs exactly once."""
    new: str
    tests: str
    """Test file, or one test, that fails then."""


BREAKS: list[Break] = []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    for name in ("verl_server", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.invariant.replace(" ", "-"))
def test_a_broken_invariant_is_noticed(copy: Path, broken: Break) -> None:
    module = copy / "verl_server" / broken.module
    whole = module.read_text()
    assert whole.count(broken.old) == 1, f"{broken.module} changed: write the break of '{broken.invariant}' anew"
    module.write_text(whole.replace(broken.old, broken.new))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not exhaustive", "-p", "no:cacheprovider"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_SERVER_TEST_")}
        env["PYTHONPATH"] = str(copy)
        done = subprocess.run(
            [*command, *broken.tests.split()], cwd=copy, env=env, capture_output=True, text=True, timeout=280
        )
    finally:
        module.write_text(whole)
    assert done.returncode == 1, (
        f"nobody noticed (exit code {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-500:]}"
    )
