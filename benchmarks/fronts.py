"""The servers and routers of `benchmarks.router`: started, known to be ready, and with the processor time they took."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.processes import process_tree
from verl_server import HttpServerEngineAdapter
from verl_server.ipc.sockets import free_port

ADMIN_KEY = "benchmark"
"""Admin key of all servers, so that one trainer can push to all. Generation needs no key."""
_READY_SECONDS = 60.0
_GRAPH_SECONDS = 240.0
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Front:
    """An address that answers `/generate`: a server, or a router in front of servers."""

    name: str
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Processor time of the process so far, and of its children if it is a router's."""
        return tree_cpu_seconds(self.pid)


@contextlib.contextmanager
def servers(count: int, tp: int, settings: dict[str, Any]) -> Iterator[list[HttpServerEngineAdapter]]:
    """Start `count` servers at once, each on GPUs of its own. Yield them when their graphs are captured."""
    first = settings.get("base_gpu_id", 0)
    every = [settings | {"base_gpu_id": first + number * tp} for number in range(count)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        starts = [
            pool.submit(HttpServerEngineAdapter, port=0, admin_api_key=ADMIN_KEY, **own)
            for own in (every if settings["device"] == "cuda" else [settings] * count)
        ]
        errors = [error for start in starts if (error := start.exception())]
        for start in starts:
            if not start.exception():
                stack.callback(start.result().shutdown)
        if errors:
            raise errors[0]
        found = [start.result() for start in starts]
        for server in found:
            until_graphs_are_captured(server)
        yield found


def until_graphs_are_captured(server: HttpServerEngineAdapter) -> None:
    """Wait until the server has captured its CUDA graphs. Raises TimeoutError."""
    deadline = time.monotonic() + _GRAPH_SECONDS
    while time.monotonic() < deadline:
        state = server.get_server_info()["internal_states"][0]  # empty during a long capture
        if state and not state.get("memory", {}).get("cuda_graphs_to_capture"):
            return
        time.sleep(0.5)
    raise TimeoutError(f"The server did not capture all CUDA graphs within {_GRAPH_SECONDS:.0f} s.")


@contextlib.contextmanager
def own_router(urls: Sequence[str]) -> Iterator[Front]:
    """Start `verl-server router` in front of servers with loaded weights. Yield it when it serves all."""
    port = free_port()
    command = [sys.executable, "-m", "verl_server", "router", "--port", str(port), "--serve-loaded-weights"]
    command += [word for url in urls for word in ("--server", url)]

    def is_ready(connection: http.client.HTTPConnection) -> bool:
        members = _get(connection, "/fleet")["servers"]
        return [member["state"] for member in members] == ["healthy"] * len(urls)

    with _process("router", command, port, is_ready) as front:
        yield front


@contextlib.contextmanager
def sglang_router(executable: Path, policy: str, urls: Sequence[str]) -> Iterator[Front]:
    """Start sglang-router in front of servers. Yield it when it has found all.

    It logs errors only, because it writes two lines for each request otherwise.
    """
    port = free_port()
    command = [str(executable), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(free_port()), "--log-level", "error", "--worker-urls", *urls]

    def is_ready(connection: http.client.HTTPConnection) -> bool:
        workers = _get(connection, "/workers")["workers"]
        return [worker["is_healthy"] for worker in workers] == [True] * len(urls)

    with _process("sglang-router", command, port, is_ready) as front:
        yield front


@contextlib.contextmanager
def tcp_relay(url: str) -> Iterator[Front]:
    """Start a relay of bytes in front of one server (`benchmarks.tcp_relay`). Yield it when the server answers."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.tcp_relay", str(port), urlsplit(url).netloc]

    def is_ready(connection: http.client.HTTPConnection) -> bool:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200

    with _process("tcp-relay", command, port, is_ready) as front:
        yield front


@contextlib.contextmanager
def _process(
    name: str, command: list[str], port: int, is_ready: Callable[[http.client.HTTPConnection], bool]
) -> Iterator[Front]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"The {name} ended with exit code {process.returncode}: its error is above.")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError), contextlib.closing(connection):
                if is_ready(connection):
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(f"The {name} did not serve all servers within {_READY_SECONDS:.0f} s.")
            time.sleep(0.1)
        yield Front(name, f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _get(connection: http.client.HTTPConnection, path: str) -> Any:
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def placements(router: Front) -> dict[str, int]:
    """Reason -> number of requests that `verl-server router` placed for it, such as a known prefix or the load."""
    address = urlsplit(router.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=5.0)
    with contextlib.closing(connection):
        found: dict[str, int] = _get(connection, "/fleet")["placements"]
    return found


def tree_cpu_seconds(root: int) -> float:
    """Processor time of a process, its threads and its running and ended children so far, in seconds (Linux)."""
    ticks = 0
    for pid in process_tree(root):
        with contextlib.suppress(OSError):  # the process has ended, and counts in its parent
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Caller:
    """One connection that sends one request of `/generate` after the other."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60.0)

    def seconds(self, body: bytes) -> float:
        """Send a body and return the seconds until the whole answer is there."""
        start = time.perf_counter()
        self._connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200:
            raise RuntimeError(f"A request was answered {answer.status}: {content[:400]!r}")
        return seconds

    def close(self) -> None:
        self._connection.close()
