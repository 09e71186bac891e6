"""A router as a process of its own, which a test can kill and start again at its port."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests import fork_server
from tests.reserved_port import reserved_port
from tests.waiting import eventually

START_SECONDS = 60.0


class RouterProcess:
    """`verl-server router` in front of servers, from the beginning of the context to its end."""

    def __init__(self, urls: list[str], folder: Path, *options: str) -> None:
        self._stack = ExitStack()
        port = self._stack.enter_context(reserved_port())
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "router.log"
        self._arguments = ["router", "--port", str(port), "--probe-interval", "0.1", "--log-level", "info", *options]
        self._arguments += [part for url in urls for part in ("--server", url)]
        self._process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start the router, and return when it answers."""
        with self._log.open("ab") as log:
            self._process = fork_server.run_module(
                "verl_server", *self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        assert eventually(self._answers, START_SECONDS), self._log.read_text()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(30)

    def states(self) -> dict[str, str]:
        """Return the state of each server, by URL."""
        return {server["url"]: server["state"] for server in self.report()["servers"]}

    def report(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/fleet", trust_env=False, timeout=10)
        return json.loads(answer.raise_for_status().content)  # type: ignore[no-any-return]

    def is_healthy(self, count: int) -> bool:
        """Return True if so many servers are healthy."""
        return list(self.states().values()).count("healthy") == count

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/liveness", trust_env=False, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def __enter__(self) -> RouterProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._stack.close()
