"""A whole server as its own processes, started as a user starts it: its output is in a file, and it can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.waiting import eventually

API_KEY = "owner-api-key-of-this-test"
ADMIN_KEY = "owner-admin-key-of-this-test"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class LiveServer:
    """`verl-server serve` with its children. Leaving the context kills all of them."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *arguments: str,
        api_key: str | None = API_KEY,
        admin_key: str | None = None,
        port: int = 0,
    ) -> None:
        """Start a server. Everything that its processes write is added to the file `log`. Port 0 is a free one."""
        self.api_key, self.admin_key, self.log = api_key, admin_key, log
        keys = {"VERL_SERVER_API_KEY": api_key, "VERL_SERVER_ADMIN_API_KEY": admin_key}
        small = ["--kv-cache-gib", "0.1", "--cpu-threads", "1", "--cpu-kernel-choice", "torch", "--port", str(port)]
        self._begin = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "verl_server", "serve", "--model-path", str(model), *small, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=_PACKAGE_ROOT,
                env=os.environ | {name: key for name, key in keys.items() if key is not None},
            )
        self.url = ""

    def __enter__(self) -> LiveServer:
        assert eventually(lambda: self._ready() or self.process.poll() is not None, 120), self.text()
        assert self.url, self.text()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _ready(self) -> bool:
        lines = self.text().splitlines()
        self.url = next((line.removeprefix("Ready: ").strip() for line in lines if line.startswith("Ready: ")), "")
        return bool(self.url)

    def text(self) -> str:
        """Return what this server wrote."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def kill(self) -> None:
        """End all processes of the server by SIGKILL."""
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)

    def owner(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON answer to a request with an owner's key."""
        headers = {"Authorization": f"Bearer {self.api_key or self.admin_key}"}
        answer = httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code < 300, answer.text
        return answer.json()


def _descendants(pid: int) -> list[int]:
    """Return the ids of the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
