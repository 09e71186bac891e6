"""Read the lines that a benchmark printed."""

from __future__ import annotations

import json
from typing import Any

import pytest


def all_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the output lines. Every line must be JSON."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the output lines by name: the last line, if several have one name."""
    return {line["name"]: line for line in all_lines(capsys)}
