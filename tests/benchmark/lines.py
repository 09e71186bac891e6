"""Reading what a benchmark printed."""

from __future__ import annotations

import json
from typing import Any

import pytest


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Name -> line; every line of the output must be JSON. Of several with one name, the last."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: line for line in lines}
