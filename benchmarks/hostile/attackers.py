"""`Attackers` runs attacks in client processes, which are `benchmarks.hammer` and `benchmarks.hostile.raw`."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.hostile import raw
from benchmarks.hostile.requests import requests

_REQUEST_SECONDS = 120.0
_HALF_OPEN_SECONDS = 8.0
"""The server ends half-open connections after 5 s when places are short, which the window must contain."""
_KEPT_ANSWERS = 20_000

Figures = dict[str, Any]


class Attackers:
    def __init__(self, names: Iterable[str], folder: Path) -> None:
        """Write the bodies of the chosen requests into `folder`."""
        every = requests()
        self.names = list(names)
        self._requests = {name: every[name] for name in self.names if name in every}
        self._bodies = {name: folder / f"{name}.json" for name in self._requests}
        for name, request in self._requests.items():
            self._bodies[name].write_text(json.dumps(request.body))

    @staticmethod
    def all_names() -> list[str]:
        return [*requests(), *raw.ATTACKS]

    def prepare(self, url: str, name: str) -> Figures:
        """Run an attack once, so that everything has started on first use, or until 20,000 answers are kept."""
        return self.run(url, name, 0.0, _KEPT_ANSWERS if name == "kept_answers_20000" else 1)

    def attack(self, url: str, name: str, seconds: float) -> Figures:
        """Run an attack for `seconds`, or as long as it needs to have its effect."""
        return self.run(url, name, max(seconds, _HALF_OPEN_SECONDS) if name == "half_open_1100" else seconds)

    def run(self, url: str, name: str, seconds: float, least: int = 1) -> Figures:
        """Run an attack for `seconds`, and at least `least` times. Returns what the client process printed."""
        address = urllib.parse.urlsplit(url).netloc
        if name in raw.ATTACKS:
            return _run("benchmarks.hostile.raw", address, name, str(seconds), str(least), seconds=seconds)
        request, body = self._requests[name], str(self._bodies[name])
        if not request.in_session:
            return _run("benchmarks.hammer", address, request.path, str(seconds), body, seconds=seconds)
        session = json.loads(_as_owner(address, "POST", "/sessions", "{}"))
        path = f"/s/{session['key']}{request.path}"
        try:
            return _run("benchmarks.hammer", address, path, str(seconds), body, seconds=seconds)
        finally:
            _as_owner(address, "DELETE", f"/sessions/{session['id']}")


def _run(module: str, *arguments: str, seconds: float) -> Figures:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds + 2 * _REQUEST_SECONDS)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _as_owner(address: str, method: str, path: str, body: str | None = None) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=_REQUEST_SECONDS)
    headers = {"Authorization": f"Bearer {raw.ADMIN_KEY}", "Content-Type": "application/json"}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path} was answered {answer.status}: {content[:300]!r}")
    return content
