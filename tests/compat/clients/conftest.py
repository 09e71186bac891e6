"""Fixtures for tests of unmodified clients, and the record of every test for docs/compatibility.md.

This folder runs inside the environments of clients, which lack this package: `python -m tests.compat.run` starts it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import socket
import subprocess
import unittest
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SETTINGS: dict[str, Any] = json.loads(os.environ.get("VERL_SERVER_COMPAT", "{}"))
_STARTUP_SECONDS = 120.0


@dataclass
class Server:
    """A running server."""

    url: str
    """Base URL without a slash at its end."""
    model: str
    """Folder of the model."""
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON answer to a POST."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read() or b"null")

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.loads(response.read() or b"null")

    def greedy(self, ids: list[int], tokens: int = 8) -> list[int]:
        """Return the most likely continuation, by the server's own route."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        output: list[int] = self.post("/generate", {"input_ids": ids, "sampling_params": sampling})["output_ids"]
        return output

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_server(**settings: Any) -> Server:
    """Start a server with a tiny model. The model's folder is shared by all servers of a run."""
    environment = os.environ | {"PYTHONPATH": SETTINGS["root"]}
    command = [SETTINGS["python"], "-m", "tests.compat.serve_tiny", SETTINGS["folder"], json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SETTINGS["root"], env=environment)
    assert process.stdout is not None
    ready = process.stdout.readline()
    assert ready, f"The server ended with status {process.wait(_STARTUP_SECONDS)}."
    return Server(process=process, **json.loads(ready))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that all tests of an environment share."""
    server = start_server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def make_server() -> Iterator[Callable[..., Server]]:
    """Start further servers, which end with the session."""
    servers: list[Server] = []

    def make(**settings: Any) -> Server:
        servers.append(start_server(**settings))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def tiny_model(server: Server) -> Path:
    return Path(server.model)


# -- the record -------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        client = item.get_closest_marker("client")
        assert client is not None, f"{item.nodeid} names no client"
        name, package = client.args
        case: Any = item
        if issubclass(case.cls or object, unittest.TestCase):  # a test of another project: its text is not ours
            exercised = f"{case.cls.__name__}.{item.name}"
        else:
            exercised = inspect.getdoc(case.function) or item.name
        if hasattr(item, "callspec"):
            exercised += f" ({item.callspec.id})"
        item.user_properties += [
            ("client", name),
            ("version", importlib.metadata.version(package) if package else "-"),
            ("exercised", " ".join(exercised.split())),
        ]


_records: list[dict[str, Any]] = []
_setup_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    if report.when == "setup":
        _setup_seconds[report.nodeid] = report.duration
    if report.when == "call" or (report.when == "setup" and not report.passed):
        result = "failed" if report.failed else "passed"
        if hasattr(report, "wasxfail"):
            result = report.wasxfail.removeprefix("reason: ")
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            result = "not run: " + report.longrepr[2].removeprefix("Skipped: ")
        if measured := properties.get("measured"):
            result += f": {measured}"
        seconds = _setup_seconds.pop(report.nodeid, 0.0) + (report.duration if report.when == "call" else 0.0)
        record = {"client": "", "version": "", "exercised": ""} | properties
        _records.append(record | {"result": result, "seconds": round(seconds, 1)})


def pytest_sessionfinish() -> None:
    if "report" in SETTINGS:
        Path(SETTINGS["report"]).write_text(json.dumps(_records), encoding="utf-8")
