"""`Watch`: a process of `verl-server watch`, and `Visit`: a page of it in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Locator, Page, expect

from tests.browser.guard import PageGuard

SECONDS = 20.0
"""Most time that a test waits for anything."""


class Watch:
    """Watches `paths` from when it is made until it is closed."""

    def __init__(self, *options: str | Path, log: Path, host: str = "127.0.0.1", key: str | None = None) -> None:
        environment = os.environ | ({} if key is None else {"VERL_SERVER_API_KEY": key})
        command = [sys.executable, "-m", "verl_server", "watch", *map(str, options), "--host", host, "--port", "0"]
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert self._process.stdout is not None
        self.key = key
        self.url = self._process.stdout.readline().strip().rstrip("/")
        assert self.url.startswith("http://"), log.read_text()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()

    def get(self, path: str) -> Any:
        """Return the answer of a path below /api."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/api{path}", headers=headers), timeout=SECONDS
        ) as answer:
            return json.load(answer)

    def run(self, name: str) -> str:
        """Return the id of a run."""
        return next(str(run["id"]) for run in self.get("/runs")["runs"] if run["name"] == name)

    def megabytes(self) -> dict[str, float]:
        """Return the memory of the process: now, and the most that it had."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines())
        return {name: int(status[key].split()[0]) / 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


class Visit:
    """One page. Waits end when a condition is true, or fail after `SECONDS`."""

    def __init__(self, page: Page, watch: Watch) -> None:
        self.page, self.watch = page, watch
        self.guard = PageGuard(page, watch.url)

    def open(self, place: str = "/") -> Visit:
        """Load the page at a place, the part of the URL after `#`."""
        self.guard.collect()
        self.page.goto("about:blank")
        self.page.goto(f"{self.watch.url}/#{place}")
        return self

    def go(self, place: str) -> None:
        """Go to a place without loading the page again."""
        self.page.evaluate("(place) => { location.hash = place; }", place)

    def open_episode(self, run: str, row: str) -> None:
        self.open(f"/episode/{run}/{quote(row, safe='')}")
        expect(self.page.locator(".episode-head h1")).to_be_visible()

    def rows(self, label: str) -> Locator:
        """Return the rows in sight of a list."""
        return self.page.get_by_role("list", name=label).locator(".row")

    def place(self) -> str:
        return str(self.page.evaluate("location.hash"))

    def until(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression is true."""
        self.page.wait_for_function(condition, arg=argument)
