"""The wheel has what the package reads beside its modules: the page's files, the boards, the kernels' sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PAGE = "verl_server/watch/site/static/"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names in a wheel that is built from a copy, so that no folder of an earlier build counts."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "verl_server", copy / "verl_server", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done = subprocess.run([sys.executable, "-c", BUILD, out], cwd=copy, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = out.glob("verl_server-*.whl")
    return set(ZipFile(wheel).namelist())


def test_the_wheel_has_each_file_of_the_package(packed: set[str]) -> None:
    files = {path for path in (ROOT / "verl_server").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    missing = {path.relative_to(ROOT).as_posix() for path in files} - packed
    assert not missing, "package-data in pyproject.toml has no pattern for them"


def test_the_wheel_has_the_page_and_the_boards(packed: set[str]) -> None:
    page = {name.removeprefix(PAGE) for name in packed if name.startswith(PAGE)}
    assert {"index.html", "app.css", "views.css", "js/main.js", "js/uplot.js", "uplot/LICENSE"} <= page
    assert {"verl_server/watch/grafana/verl-server.json", "verl_server/watch/grafana/prometheus.yml"} <= packed
