"""`make test-cuda` with any interpreter: which files and packages it needs, and what it says if one is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_cuda
from tests.cuda_files import TESTS, files_with_cuda_tests

ARENA = TESTS / "worker" / "test_memory_arena.py"


def test_the_packages_are_those_of_the_files_and_of_an_engine() -> None:
    needed = run_cuda.needed_modules(files_with_cuda_tests())
    assert {"torch", "triton", "transformers", "pytest", "llguidance", "prometheus_client", "starlette"} <= needed
    assert not needed & {"openai", "gymnasium", "reasoning_gym", "tests", "verl_server", "json"}
    assert "triton" not in run_cuda.needed_modules([ARENA])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cuda, "_is_there", lambda module: module not in ("re2", "prometheus_client"))
    assert run_cuda.missing_packages([ARENA]) == ["prometheus-client", "google-re2"]


def test_an_interpreter_without_packages_installs_nothing_and_says_what_it_lacks() -> None:
    command = [sys.executable, "-S", "-m", "tests.run_cuda", "-n", "2"]  # -S: without site-packages
    done = subprocess.run(command, cwd=run_cuda.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    assert all(f" {name}" in done.stderr for name in ("google-re2,", "pytest,", "torch,", "pytest-xdist (for -n)."))


@pytest.mark.parametrize(
    ("arguments", "options", "targets"),
    [
        (["-k", "arena", "-x"], ["-k", "arena", "-x"], files_with_cuda_tests()),
        ([f"{ARENA}::test_it", "-x"], ["-x"], [f"{ARENA}::test_it"]),
        ([str(TESTS / "parity")], [], [TESTS / "parity" / "test_cuda.py"]),
    ],
)
def test_targets_are_the_files_with_cuda_tests(
    arguments: list[str], options: list[str], targets: list[Path | str]
) -> None:
    assert run_cuda.split(arguments) == (options, [str(target) for target in targets])
