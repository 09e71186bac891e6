"""Finds the test files that have tests marked `cuda`, by their text, without importing them."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ELSEWHERE = ("agents", "compat", "verl")
"""Folders whose tests run in environments of their own."""
_NAMES_CUDA = re.compile(r"\bmark\.cuda\b|\bdevice: torch\.device\b|\bpdl: bool\b")
"""The marker, or one of the fixtures of `conftest` of which one parameter has the marker."""


def names_cuda(file: Path) -> bool:
    """Return True for each file with a test marked `cuda`, and perhaps for others."""
    return _NAMES_CUDA.search(file.read_text(encoding="utf-8")) is not None


def files_with_cuda_tests() -> list[Path]:
    files = sorted(TESTS.rglob("test_*.py"))
    return [file for file in files if file.relative_to(TESTS).parts[0] not in ELSEWHERE and names_cuda(file)]
