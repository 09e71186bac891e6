"""`sglang-router` in front of two servers."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Server

pytestmark = pytest.mark.client("sglang-router", "sglang-router")

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
_START_SECONDS = 60.0


@pytest.fixture(scope="module")
def servers(server: Server, make_server: Callable[..., Server]) -> list[Server]:
    return [server, make_server()]


@pytest.fixture(scope="module")
def router(servers: list[Server]) -> Iterator[Server]:
    """The router, as a client sees it: a server."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--policy", "round_robin", "--worker-urls"]
    process = subprocess.Popen([*command, *(server.url for server in servers)], text=True)
    router = Server(f"http://127.0.0.1:{port}", servers[0].model, process)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            workers = router.get("/workers")["workers"]
            if sum(worker["is_healthy"] for worker in workers) == 2:
                break
        except OSError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, "the router did not find its workers"
        time.sleep(0.2)
    yield router
    router.stop()


def requests_of(server: Server) -> int:
    state: dict[str, Any] = server.get("/server_info")["internal_states"][0]
    return int(state["num_requests"])


def test_generate(router: Server, servers: list[Server]) -> None:
    """`/generate` through the router: the servers' own output, and both servers work."""
    before = [requests_of(server) for server in servers]
    expected = servers[0].greedy([70, 71], 6)

    def one(_: int) -> Any:
        body = {"input_ids": [70, 71], "sampling_params": GREEDY, "return_logprob": True}
        return router.post("/generate", body)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(32)))
    assert all(answer["output_ids"] == expected for answer in answers)
    assert all(len(answer["meta_info"]["output_token_logprobs"]) == 6 for answer in answers)
    assert all(after - first > 8 for after, first in zip(map(requests_of, servers), before, strict=True))


def test_chat(router: Server, servers: list[Server]) -> None:
    """`/v1/chat/completions` through the router, plain and as a stream."""
    body = {
        "model": servers[0].model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    plain = router.post("/v1/chat/completions", body)
    assert (
        plain["choices"][0]["message"]["content"]
        == servers[1].post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    )
    request = urllib.request.Request(
        f"{router.url}/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        frames = [line[6:] for line in response.read().decode().split("\n") if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    deltas = [json.loads(frame)["choices"] for frame in frames[:-1]]
    text = "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)
    assert text == plain["choices"][0]["message"]["content"]


def test_information(router: Server, servers: list[Server]) -> None:
    """The router reads its workers: models, server information, loads, health, flush."""
    assert router.get("/v1/models")["data"][0]["id"] == servers[0].model
    assert router.get("/get_model_info")["model_path"] == servers[0].model
    workers = router.get("/workers")["workers"]
    assert {worker["url"] for worker in workers} == {server.url for server in servers}
    with urllib.request.urlopen(f"{router.url}/health", timeout=10) as response:
        assert response.status == 200
    loads = router.get("/get_loads")["workers"]
    assert {load["load"] for load in loads} == {0}, loads
    request = urllib.request.Request(f"{router.url}/flush_cache", b"", method="POST")
    with urllib.request.urlopen(request, timeout=20) as response:
        assert response.status == 200
