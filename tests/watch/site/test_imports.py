"""The process of `verl-server watch` imports no module that takes hundreds of megabytes."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "transformers", "pydantic", "numpy", "pyarrow")
CODE = f"""
import json, sys
import verl_server.cli.main, verl_server.cli.watch
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""


def test_the_command_loads_no_heavy_package() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(found.stdout) == []
