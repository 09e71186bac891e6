"""Packages in the place of wandb and trackio, which write their calls to a file and have a fault on request.

A test puts them on PYTHONPATH of the trackers' process. `calls` reads what they wrote.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_COMMON = """
import json, os, threading

def note(**call):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        print(json.dumps({"package": __name__} | call), file=file)

def fault(place):
    kind, _, where = os.environ.get("FAKE_FAULT", "").partition("@")
    if where != f"{__name__}.{place}":
        return
    if kind == "raises":
        raise ConnectionError("nobody answers")
    if kind == "exits":
        raise SystemExit("log in first")
    if kind == "hangs":
        threading.Event().wait()
    if kind == "crashes":
        os._exit(7)

class Run:
    step = 0
    def __init__(self, id):
        self.id = id
    def define_metric(self, *args, **kwargs):
        pass
    def log(self, figures, step):
        fault("log")
        note(call="log", run=self.id, step=step, figures=figures)
    def finish(self, exit_code=None):
        fault("finish")
        note(call="finish", run=self.id, exit_code=exit_code)

def init(project, name, config, id=None, **_):
    fault("init")
    run = Run(id or os.urandom(4).hex())
    note(call="init", run=run.id, project=project, name=name, config=config)
    return run
"""
_WANDB = _COMMON + "\ndef Settings(**_):\n    return None\n"


class FakePackages:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._calls = folder / "calls.jsonl"
        for name, source in {"wandb": _WANDB, "trackio": _COMMON}.items():
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(source)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        patch.setenv("FAKE_CALLS", str(self._calls))
        patch.syspath_prepend(str(folder))

    def break_at(self, kind: str, place: str) -> None:
        """Let `place`, such as wandb.log, have a fault: raises, exits, hangs or crashes."""
        self._patch.setenv("FAKE_FAULT", f"{kind}@{place}")

    def repair(self) -> None:
        self._patch.delenv("FAKE_FAULT", raising=False)

    def calls(self, package: str, call: str) -> list[dict[str, Any]]:
        """Return the calls of a function of a package, in order."""
        text = self._calls.read_text() if self._calls.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return [line for line in found if (line["package"], line["call"]) == (package, call)]

    def logged(self, package: str, figure: str = "reward/mean") -> list[tuple[int, float]]:
        """Return (step, value) of a figure, in order."""
        lines = self.calls(package, "log")
        return [(line["step"], line["figures"][figure]) for line in lines if figure in line["figures"]]
