"""Fixtures for tests of unmodified clients, and the record of every test for docs/compatibility.md.

This folder runs inside the environments of clients, which lack this package: `python -m tests.compat.run` starts it.
Each test that uses a server runs twice: with a server, and with `verl-server router` in front of servers (`way`).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import socket
import subprocess
import time
import unittest
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SETTINGS: dict[str, Any] = json.loads(os.environ.get("VERL_SERVER_COMPAT", "{}"))
WAYS = ("server", "router")
"""Ways in which a test runs a client: directly with a server, or through the router."""
_LAUNCHES = "it launches its server and pushes weights to it, and weights do not pass through the router"
NOT_ROUTED = {
    "test_sglang_adapter.py": _LAUNCHES,
    "test_verl.py": f"{_LAUNCHES}; an adapter that does neither is in the table",
    "test_slime.py": _LAUNCHES,
    "test_router.py": "it is a router itself, which has the place of ours",
}
"""File -> why its clients cannot talk to the router."""
_ROUTED_SERVERS = 2
"""Servers behind the router. Those with a model of their own have one: two of them are slow on two cores."""
_STARTUP_SECONDS = 120.0


@dataclass
class Server:
    """A running server."""

    url: str
    """Base URL without a slash at its end."""
    model: str
    """Folder of the model."""
    process: subprocess.Popen[str]
    behind: list[Server] = field(default_factory=list)
    """The servers behind the router, if this is one."""

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

    def is_ready(self) -> bool:
        """Return True if `/ready` says so."""
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=60) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for server in self.behind:
            server.stop()


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


def start_router(servers: list[Server], key: str | None) -> Server:
    """Start the router in front of servers that have this key. Clients see it as a server."""
    port = free_port()
    command = [SETTINGS["python"], "-m", "verl_server", "router", "--port", str(port)]
    for server in servers:
        command += ["--server", server.url]
    if key is not None:
        file = Path(SETTINGS["folder"]) / "servers_key"
        file.write_text(key, encoding="utf-8")
        command += ["--server-api-key-file", str(file)]
    process = subprocess.Popen(command, text=True, cwd=SETTINGS["root"])
    router = Server(f"http://127.0.0.1:{port}", servers[0].model, process, servers)
    deadline = time.monotonic() + _STARTUP_SECONDS
    while not router.is_ready():
        assert process.poll() is None and time.monotonic() < deadline, "the router did not find its servers"
        time.sleep(0.1)
    return router


@pytest.fixture(scope="session")
def way(request: pytest.FixtureRequest) -> str:
    """Which of `WAYS` a test runs. Tests of `unittest`'s classes run one for the whole session: they take no values."""
    return str(getattr(request, "param", _session_way()))


def _session_way() -> str:
    return str(SETTINGS["ways"][-1])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        ways = [way for way in SETTINGS["ways"] if way == "server" or metafunc.definition.path.name not in NOT_ROUTED]
        metafunc.parametrize("way", ways, indirect=True, scope="session")


@pytest.fixture(scope="session")
def make_server(way: str) -> Iterator[Callable[..., Server]]:
    """Start servers, which end with the last test of this way."""
    servers: list[Server] = []

    def make(**settings: Any) -> Server:
        if way == "server":
            servers.append(start_server(**settings))
        else:
            count = 1 if "model_path" in settings else _ROUTED_SERVERS
            behind = [start_server(**settings) for _ in range(count)]
            servers.append(start_router(behind, settings.get("api_key")))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(make_server: Callable[..., Server]) -> Server:
    """The server that all tests of an environment share."""
    return make_server()


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
        way, others = _session_way(), []
        if hasattr(item, "callspec"):
            way = item.callspec.params.get("way", way)
            others = [part for part in item.callspec.id.split("-") if part != way]
        if others:
            exercised += f" ({'-'.join(others)})"
        item.user_properties += [
            ("way", way),
            ("not_routed", NOT_ROUTED.get(item.path.name)),
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
