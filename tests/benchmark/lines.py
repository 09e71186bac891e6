"""Read the lines that a benchmark printed."""

from __future__ import annotations

import json
from typing import Any

import pytest


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the output lines by name (the last line, if several have one name). Every line must be JSON."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: line for line in lines}
