"""A trainer gives up a push while it waits, because it is interrupted or killed, or its connection is closed.

The server then keeps the old weights.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from tests import fork_server
from verl_server import HttpServerEngineAdapter
from verl_server.errors import UpdateConflictError
from verl_server.models.tiny import make_model_folder

NORM = "model.norm.weight"
LONG = {"temperature": 0.0, "max_new_tokens": 20_000, "ignore_eos": True}
"""Sampling parameters of requests that must outlive every wait of these tests, also on a loaded machine."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServerEngineAdapter]:
    folder = make_model_folder(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=32_768)
    with HttpServerEngineAdapter(model_path=str(folder), kv_cache_gib=0.3, cpu_threads=1, port=0) as engine:
        yield engine


def state(engine: HttpServerEngineAdapter) -> dict[str, Any]:
    internal: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return internal


def wait_for(engine: HttpServerEngineAdapter, **expected: Any) -> dict[str, Any]:
    """Wait until the server's state has the expected values, and return the state."""
    deadline = time.monotonic() + 30
    while any((seen := state(engine))[name] != value for name, value in expected.items()):
        assert time.monotonic() < deadline, f"waited for {expected}, got {seen}"
        time.sleep(0.01)
    return seen


@contextlib.contextmanager
def long_requests(engine: HttpServerEngineAdapter) -> Iterator[None]:
    """Run requests that a push in mode "wait" has to wait for, and abort them afterwards."""
    prompts = [[5, 6, n] for n in range(8)]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(engine.generate, input_ids=prompts, sampling_params=LONG)
        wait_for(engine, num_running_reqs=len(prompts))
        try:
            yield
        finally:
            engine.abort_request(abort_all=True)
            job.result(30)


@contextlib.contextmanager
def trainer(engine: HttpServerEngineAdapter, how: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that is ready to push."""
    size = str(len(engine.get_weights_by_name(NORM)))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes["env"] = os.environ | {"VERL_SERVER_ADMIN_API_KEY": str(engine.admin_api_key)}
    arguments = str(engine.url), how, NORM, size
    with fork_server.run_module("tests.engine.giving_up_trainer", *arguments, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("how", ["registered", "once"])
def test_an_interrupted_push_is_withdrawn_and_the_next_one_is_clean(engine: HttpServerEngineAdapter, how: str) -> None:
    engine.update_weights_from_disk(engine.server_args.model_path)
    before, norm = state(engine)["weight_version"], engine.get_weights_by_name(NORM)
    with trainer(engine, how) as process:
        assert process.stdout is not None
        with long_requests(engine):
            tell(process)
            wait_for(engine, draining=True)
            process.send_signal(signal.SIGINT)
            assert "ended without the server's answer" in process.stdout.readline()
            assert wait_for(engine, draining=False)["num_running_reqs"] > 0, (
                "the running requests must outlive the withdrawn push"
            )
        engine.flush_cache(timeout=10)
        assert state(engine)["weight_version"] == before and engine.get_weights_by_name(NORM) == norm
        tell(process)
        assert process.stdout.readline() == "True\n"
        assert set(engine.get_weights_by_name(NORM)) == {3.0} and state(engine)["weight_version"] != before


@pytest.mark.parametrize("how", ["registered", "once"])
def test_the_push_of_a_killed_trainer_is_withdrawn(engine: HttpServerEngineAdapter, how: str) -> None:
    before, sums = state(engine)["weight_version"], engine.weights_checker()
    with trainer(engine, how) as process, long_requests(engine):
        tell(process)
        wait_for(engine, draining=True)
        process.kill()
        assert wait_for(engine, draining=False)["num_running_reqs"] > 0
    assert state(engine)["weight_version"] == before and engine.weights_checker() == sums


def test_an_engine_leaves_a_transaction_whose_lease_ended(engine: HttpServerEngineAdapter) -> None:
    engine.begin_weight_update(lease_seconds=0.05)
    wait_for(engine, transaction=None)
    with pytest.raises(UpdateConflictError, match="This engine has left the transaction"):
        engine.update_weights_from_disk(engine.server_args.model_path)
    assert engine.update_weights_from_disk(engine.server_args.model_path)[0]


def test_a_connection_that_is_closed_withdraws_what_it_asked_for(engine: HttpServerEngineAdapter) -> None:
    """The client is a bare socket. A transaction, for example, must not hold generation until its lease ends."""
    host, port = str(engine.url).removeprefix("http://").split(":")
    body = orjson.dumps({"transaction_id": "nobody's"})
    key = f"Authorization: Bearer {engine.admin_api_key}"
    head = f"POST /begin_weight_update HTTP/1.1\r\nHost: {host}\r\n{key}\r\nContent-Length: {len(body)}\r\n\r\n"
    with long_requests(engine):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_for(engine, draining=True)
        seen = wait_for(engine, draining=False)
        assert seen["transaction"] is None and seen["num_running_reqs"] > 0
