"""A real server over HTTP, with schedulers that tests can hold (see `pauses`).

`launched` starts the server as `HttpServerEngineAdapter` does. Run as a module, this file is the server process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests import fork_server
from tests.faults.pauses import FOLDER
from verl_server import HttpServerEngineAdapter
from verl_server.engine import http as http_engine
from verl_server.ipc.child_process import ChildProcess, child_main
from verl_server.server import launch

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "port": 0,
    "admin_api_key": "admin-key",
    "kv_cache_gib": 0.02,
    "cpu_threads": 1,
    "log_level": "warning",
    "random_seed": 1,
    "control_timeout": 30.0,
    "sync_timeout": 6.0,
    "check_invariants": True,
}


@contextlib.contextmanager
def holdable(pauses: Path) -> Iterator[None]:
    """Let tests hold the servers that adapters of this process launch inside the context."""

    def child(name: str, module: str, argument: dict[str, Any]) -> ChildProcess:
        assert (name, module) == ("server", "verl_server.server.launch")
        return ChildProcess(name, "tests.faults.server", argument, env={FOLDER: str(pauses)})

    with mock.patch.object(http_engine, "ChildProcess", child):
        yield


def launched(pauses: Path, model: Path, **settings: Any) -> HttpServerEngineAdapter:
    with holdable(pauses), fork_server.real_processes():  # tests look for the schedulers among its child processes
        return HttpServerEngineAdapter(model_path=str(model), **(SETTINGS | settings))


def _serve(argument: dict[str, Any], ready: Any) -> None:
    def child(name: str, module: str, argument: dict[str, Any], pass_fds: tuple[int, ...]) -> ChildProcess:
        assert module == "verl_server.scheduler.process"
        return ChildProcess(name, "tests.faults.scheduler", argument, pass_fds=pass_fds)

    with mock.patch.object(launch, "ChildProcess", child):
        launch._serve_child(argument, ready)


if __name__ == "__main__":
    child_main(_serve)
