"""The pages on sessions and agents open with an example that runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bubblewrap import needs_bubblewrap
from verl_server.rollout.trajectory import read_jsonl

ROOT = Path(__file__).parents[2]


def run_example(page: str, folder: Path) -> list[str]:
    """Run the first code block of a page as a script in `folder`, and return the lines that it prints."""
    pytest.importorskip("openai")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    assert found is not None and found[1] == "python"
    assert len(found[2].splitlines()) <= 30, "the example of a page has at most 30 lines"
    script = folder / "example.py"
    script.write_text(found[2], encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=folder, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(240)
def test_the_example_of_sessions_runs(tmp_path: Path) -> None:
    (branch, versions) = run_example("sessions.md", tmp_path)
    assert branch.startswith("1.0 ") and versions.count("'version': 'default'") == 2, "two turns, one branch"


@pytest.mark.timeout(240)
def test_the_example_of_agents_runs(tmp_path: Path) -> None:
    lines = run_example("agents.md", tmp_path)
    assert [line.split()[:3] for line in lines] == [[str(i), str(m), "done"] for i in range(2) for m in range(4)]
    written = read_jsonl(tmp_path / "runs" / "cats" / "trajectories.jsonl")
    assert len(written) == 8 and all(t.reward is not None and len(t.turns) == 3 for t in written)


@needs_bubblewrap
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")
@pytest.mark.timeout(240)
def test_the_example_of_recipes_runs(tmp_path: Path) -> None:
    lines = run_example("recipes.md", tmp_path)
    assert [line.split()[0] for line in lines] == ["done", "done"]
    assert all(float(reward) > 0 and int(tokens) > 0 for _, reward, tokens in map(str.split, lines))
