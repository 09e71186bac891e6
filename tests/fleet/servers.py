"""Three small servers and a router as processes of their own, which can be killed and started again at their ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from tests import fork_server
from tests.compat.serve_tiny import CHAT_TEMPLATE
from tests.reserved_port import reserved_port
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import byte_tokenizer, make_model_folder

KEY, ADMIN_KEY = "api-key-of-the-fleet", "admin-key-of-the-fleet"
OWNER = {"Authorization": f"Bearer {KEY}"}
START_SECONDS = 90.0
SETTLE_SECONDS = 10.0
"""Seconds within which the router has noticed what changed."""
LOADED = "default"
"""Label of the weights that a server loads."""
_SETTINGS: dict[str, Any] = {
    "kv_cache_gib": 0.1,
    "cpu_threads": 1,
    "text_workers": 1,
    "api_key": KEY,
    "admin_api_key": ADMIN_KEY,
    "log_level": "warning",
    # A row of a batch is computed by itself, so that tokens do not depend on the requests beside them.
    "cpu_kernel_choice": "cpp",
    "disable_radix_cache": True,
    "chunked_prefill_size": 2**17,
}


def make_model(folder: Path) -> Path:
    """Make a model without an end token, so that each output has as many tokens as its request says."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = CHAT_TEMPLATE, None
    shape: dict[str, Any] = {"max_position_embeddings": 4096, "eos_token_id": None}
    return make_model_folder(folder, "qwen3", tokenizer=tokenizer, init_std=0.2, **shape)


def version(number: int) -> str:
    return f"{number}@5f2c9a1e"


class _Process:
    """A module as a process, with a port of its own and its output in a file."""

    def __init__(self, name: str, port: int, folder: Path) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.port = port
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[Any] | None = None
        self._begin = 0

    def _arguments(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start the process, and do not wait for it."""
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        module, *arguments = self._arguments()
        with self.log.open("ab") as log:
            self._process = fork_server.run_module(
                module, *arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ)
            )

    def wait_ready(self) -> None:
        assert self._process is not None
        assert eventually(lambda: self._says_ready() or self._process.poll() is not None, START_SECONDS), self.text()
        assert self._says_ready(), self.text()

    def _says_ready(self) -> bool:
        return self.url in self.text()

    def text(self) -> str:
        """Return what this run wrote."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        assert self._process is not None
        return self._process.wait(30)

    def kill(self) -> None:
        """End the process by SIGKILL. Its children end by themselves."""
        if self.is_running:
            self.signal(signal.SIGKILL)
            assert self._process is not None
            self._process.wait(30)


class Server(_Process):
    """A server with a session store, which it finds again when it is started again."""

    def __init__(self, name: str, port: int, folder: Path, model: Path) -> None:
        super().__init__(name, port, folder)
        self._model, self._store = model, folder / f"{name}.store"

    def _arguments(self) -> list[str]:
        settings = {"model_path": str(self._model), "port": self.port, "session_store": str(self._store)} | _SETTINGS
        return ["tests.compat.serve_tiny", str(self.log.parent), json.dumps(settings)]

    @property
    def running_requests(self) -> int:
        """Number of requests that the server generates for now."""
        answer = httpx.get(f"{self.url}/get_load", headers=OWNER, trust_env=False, timeout=10)
        return sum(int(each["num_reqs"]) for each in answer.raise_for_status().json())


class Router(_Process):
    def __init__(self, port: int, folder: Path, servers: list[Server], *options: str) -> None:
        super().__init__("router", port, folder)
        key = folder / "key"
        key.write_text(KEY)
        self._options = ["--port", str(port), "--server-api-key-file", str(key), "--log-level", "info", *options]
        self._options += [part for server in servers for part in ("--server", server.url)]

    def _arguments(self) -> list[str]:
        return ["verl_server", "router", *self._options]


class Fleet:
    """Servers and a router, from the beginning of the context to its end."""

    def __init__(self, folder: Path, model: Path, *options: str, servers: int = 3) -> None:
        self._stack = ExitStack()
        ports = [self._stack.enter_context(reserved_port()) for _ in range(servers + 1)]
        self.servers = [Server(f"server{i}", port, folder, model) for i, port in enumerate(ports[1:])]
        self.router = Router(ports[0], folder, self.servers, *options)
        self.number = 0
        """Number of the newest version that was pushed."""
        auto: Any = AutoModelForCausalLM
        self._weights = auto.from_pretrained(model, dtype=torch.float32).state_dict()
        self.client = httpx.Client(base_url=self.router.url, headers=OWNER, trust_env=False, timeout=90)
        """Client of the router, for all threads of a test."""

    def __enter__(self) -> Fleet:
        self._stack.callback(self.client.close)
        for process in (*self.servers, self.router):
            self._stack.callback(process.kill)
            process.start()
        for process in (*self.servers, self.router):
            process.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def server(self, url: str) -> Server:
        return next(server for server in self.servers if server.url == url)

    def push(self, server: Server, number: int) -> None:
        """Push the weights of a version to one server, as a trainer does."""
        tensors = [(name, tensor * (1 + 0.02 * number)) for name, tensor in self._weights.items()]
        with HttpServerEngineAdapter.attach(server.url, KEY, ADMIN_KEY) as engine:
            engine.update_weights_from_tensor(tensors, weight_version=version(number))

    def begin_push(self, server: Server, number: int) -> Callable[[], None]:
        """Push one half of the weights, which keeps the server from generating. Return what pushes the other half."""
        tensors = [(name, tensor * (1 + 0.02 * number)) for name, tensor in self._weights.items()]
        engine = HttpServerEngineAdapter.attach(server.url, KEY, ADMIN_KEY)
        self._stack.callback(engine.shutdown)
        engine.begin_weight_update()
        engine.update_weights_from_tensor(tensors[::2])

        def finish() -> None:
            engine.update_weights_from_tensor(tensors[1::2])
            engine.end_weight_update(weight_version=version(number))

        return finish

    def commit(self, number: int) -> None:
        body = {"weight_version": version(number)}
        self.client.post("/fleet/commit", json=body).raise_for_status()

    def states(self) -> dict[str, str]:
        """Return url -> state of each server, as the router sees them."""
        answer = self.client.get("/fleet").raise_for_status().json()
        return {server["url"]: server["state"] for server in answer["servers"]}

    def requests(self, server: Server) -> int:
        """Return the number of requests that the router has sent to a server and that are not answered."""
        servers = self.client.get("/fleet").raise_for_status().json()["servers"]
        return int(next(each["requests"] for each in servers if each["url"] == server.url))

    def until(self, holds: Callable[[dict[str, str]], bool], seconds: float = SETTLE_SECONDS) -> None:
        """Wait until the states of the servers are as they should be."""
        assert eventually(lambda: holds(self.states()), seconds), self.client.get("/fleet").text

    def push_all(self) -> None:
        """Push the next version to all servers, and declare it."""
        self.number += 1
        for server in self.servers:
            self.push(server, self.number)
        self.commit(self.number)
        self.until_healthy()

    def restart(self) -> list[Server]:
        """Start everything that was killed. Return the servers among it, which have the weights that they loaded."""
        down = [process for process in (*self.servers, self.router) if not process.is_running]
        for process in down:
            process.start()
        for process in down:
            process.wait_ready()
        return [process for process in down if isinstance(process, Server)]

    def heal(self) -> None:
        """Start what was killed, with the weights of the fleet, and wait until the router uses all servers."""
        for server in self.restart():
            self.push(server, self.number)
        self.until_healthy()

    def until_healthy(self) -> None:
        self.until(lambda states: set(states.values()) == {"healthy"})
