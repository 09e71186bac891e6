"""A trainer that gives up a push while it waits: interrupted, killed, cut off. The old weights go on, for good."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from verl_server import HttpServerEngineAdapter
from verl_server.errors import UpdateConflictError

NORM = "model.norm.weight"
LONG = {"temperature": 0.0, "max_new_tokens": 450, "ignore_eos": True}
TRAINER = f"""
import sys, torch
from verl_server import HttpServerEngineAdapter

engine = HttpServerEngineAdapter.attach(sys.argv[1])
named = [("{NORM}", torch.full((int(sys.argv[3]),), 2.0))]
if sys.argv[2] == "registered":
    engine.register_weights(named)
    push = engine.push_weights
else:
    push = lambda: engine.update_weights_from_tensor(named)
print("ready", flush=True)
sys.stdin.readline()
try:
    push()
except KeyboardInterrupt as error:
    named[0][1].fill_(3.0)
    print(*error.__notes__, flush=True)
sys.stdin.readline()
print(push()[0], flush=True)
"""


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter(model_path=str(tiny_llama), kv_cache_gib=0.1, cpu_threads=1, port=0) as engine:
        yield engine


def state(engine: HttpServerEngineAdapter) -> dict[str, Any]:
    internal: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return internal


def wait_for(engine: HttpServerEngineAdapter, **expected: Any) -> dict[str, Any]:
    """The server's figures as soon as they are so."""
    deadline = time.monotonic() + 30
    while any((seen := state(engine))[name] != value for name, value in expected.items()):
        assert time.monotonic() < deadline, f"waited for {expected}, got {seen}"
        time.sleep(0.01)
    return seen


@contextlib.contextmanager
def long_requests(engine: HttpServerEngineAdapter) -> Iterator[None]:
    """Requests that a push in mode "wait" has to wait for; they are ended at the end."""
    prompts = [[5, 6, n] for n in range(128)]
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
    """A process that is ready to push."""
    size = str(len(engine.get_weights_by_name(NORM)))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(engine.url), how, size], **pipes) as process:
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
            assert wait_for(engine, draining=False)["num_running_reqs"] > 0, "nobody was waited for any more"
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


def test_an_engine_leaves_a_session_whose_lease_ended(engine: HttpServerEngineAdapter) -> None:
    engine.begin_weight_update(lease_seconds=0.05)
    wait_for(engine, session=None)
    with pytest.raises(UpdateConflictError, match="This engine has left the session"):
        engine.update_weights_from_disk(engine.server_args.model_path)
    assert engine.update_weights_from_disk(engine.server_args.model_path)[0]


def test_a_connection_that_is_closed_withdraws_what_it_asked_for(engine: HttpServerEngineAdapter) -> None:
    """Any client: a begun session, say, would hold generation until its lease ends."""
    host, port = str(engine.url).removeprefix("http://").split(":")
    body = orjson.dumps({"transaction_id": "nobody's"})
    head = f"POST /begin_weight_update HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with long_requests(engine):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_for(engine, draining=True)
        seen = wait_for(engine, draining=False)
        assert seen["session"] is None and seen["num_running_reqs"] > 0
