"""Whole servers start, announce themselves, fail and stop. HTTP over a live engine works in orders that once hung."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.depth import at_depth
from tests.waiting import eventually
from verl_server import Engine, HttpServerEngineAdapter, ServerArgs, ServerDiedError, ServerLaunchError, launch_server
from verl_server.errors import BadRequestError
from verl_server.ipc.sockets import bind_socket, free_port
from verl_server.server.launch import launch_server_from_verl_engine

SMALL: dict[str, Any] = {"kv_cache_gib": 0.05, "cpu_threads": 1}
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


def http_generate(url: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/generate", json={"input_ids": [5], "sampling_params": GREEDY} | body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


# -- launch_server ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "verl_server", "serve", "--kv-cache-gib", "0.05", "--cpu-threads", "1", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=10)


def wait_for_line(process: subprocess.Popen[str], start: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"the server ended with {process.wait(10)} before it said {start!r}")


@pytest.mark.parametrize("number", at_depth([signal.SIGTERM, signal.SIGINT]))
def test_signal_ends_everything_with_status_0(tiny_llama: Path, number: signal.Signals) -> None:
    with serving("--model-path", str(tiny_llama), "--port", "0") as process:
        url = wait_for_line(process, "Ready: ")
        scheduler = httpx.get(f"{url}/server_info").json()["scheduler_info"]["pid"]
        long = {"sampling_params": GREEDY | {"max_new_tokens": 500}}
        answers: list[Any] = []
        httpx.post(f"{url}/pause_generation", json={"mode": "in_place"})
        thread = threading.Thread(target=lambda: answers.append(http_generate(url, **long)))
        thread.start()
        assert eventually(lambda: httpx.get(f"{url}/server_info").json()["internal_states"][0]["num_waiting_reqs"])
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
        assert time.monotonic() - began < 15
        thread.join(timeout=10)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort", "a running request got no answer"
        with pytest.raises(FileNotFoundError):
            os.stat(f"/proc/{scheduler}/stat")


def test_launch_server_announces_after_the_warm_up_and_blocks(tiny_llama: Path) -> None:
    reader, writer = Pipe(duplex=False)
    args = ServerArgs(model_path=str(tiny_llama), port=free_port(), **SMALL)
    called = threading.Event()
    outcome: list[Exception] = []

    def serve() -> None:
        try:
            launch_server(args, pipe_finish_writer=writer, launch_callback=called.set)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    while not reader.poll(0.05):
        with contextlib.suppress(httpx.TransportError):
            # As soon as the port is taken, a starting server answers that it is starting.
            assert httpx.get(f"{args.url}/health", timeout=5).status_code in (200, 503)
    assert reader.recv() == "ready" and called.wait(10)
    assert httpx.get(f"{args.url}/health").status_code == 200
    info = httpx.get(f"{args.url}/server_info").json()
    assert thread.is_alive()
    os.kill(info["scheduler_info"]["pid"], signal.SIGKILL)
    thread.join(timeout=20)
    assert not thread.is_alive(), "the server outlived its scheduler"
    assert isinstance(outcome[0], ServerDiedError) and "SIGKILL" in str(outcome[0])


def test_failed_start_sends_the_cause_through_the_pipe(tiny_llama: Path) -> None:
    reader, writer = Pipe(duplex=False)
    # These settings pass the checks of this process; the scheduler process detects the error.
    args = ServerArgs(model_path=str(tiny_llama), port=0, context_length=10**9, max_total_tokens=1, **SMALL)
    with pytest.raises(ServerLaunchError):
        launch_server(args, pipe_finish_writer=writer)
    text = reader.recv()
    assert text.startswith("context_length=1000000000 exceeds") and "Traceback" not in text


def test_port_in_use_is_told_before_the_model_is_loaded(tiny_llama: Path) -> None:
    reader, writer = Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ServerLaunchError, match=rf"127\.0\.0\.1:{port}.*in use"):
            launch_server(ServerArgs(model_path=str(tiny_llama), port=port), pipe_finish_writer=writer)
        assert time.monotonic() - began < 2
        assert f":{port}" in reader.recv()


@pytest.mark.parametrize("name", ["session_store", "profile_folder"])
def test_a_folder_that_cannot_be_written_is_told_before_the_model_is_loaded(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def too_early(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started before the folder was tried")

    monkeypatch.setattr("verl_server.server.launch.ChildProcess", too_early)
    (tmp_path / "file").write_text("")
    args = ServerArgs(model_path=str(tiny_llama), port=0, **{name: str(tmp_path / "file")})
    with pytest.raises(BadRequestError, match=rf"ServerArgs\.{name}: .*cannot be a folder"):
        launch_server(args)


def test_second_bind_fails_at_once() -> None:
    with bind_socket("127.0.0.1", 0) as first, pytest.raises(ServerLaunchError, match="in use"):
        bind_socket("127.0.0.1", first.getsockname()[1])


def test_unknown_host_is_a_clear_error() -> None:
    with pytest.raises(ServerLaunchError, match=r"203\.0\.113\.1:0"):
        bind_socket("203.0.113.1", 0)


def test_user_errors_of_the_command_line_are_one_message(tmp_path: Path) -> None:
    with serving("--model-path", str(tmp_path / "absent")) as process:
        assert process.wait(timeout=30) == 1
        assert process.stderr is not None
        text = process.stderr.read()
    (line,) = text.splitlines()
    assert line.startswith("verl-server serve: --model-path ") and "does not exist" in line


def test_an_error_of_the_scheduler_is_told_once(tiny_llama: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_llama / "model.safetensors")
    del weights["model.norm.weight"]
    shutil.copytree(tiny_llama, tmp_path / "model")
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with serving("--model-path", str(tmp_path / "model"), "--port", "0") as process:
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        (line,) = (line for line in process.stderr.read().splitlines() if " INFO " not in line)
    assert line.startswith("verl-server serve: The weights in ") and "missing: model.norm.weight" in line
    with pytest.raises(ServerLaunchError) as caught:
        HttpServerEngineAdapter(model_path=str(tmp_path / "model"), port=0, **SMALL)
    assert str(caught.value).count("model.norm.weight") == 1 and "\n" not in str(caught.value)


# -- two nodes on one host ----------------------------------------------------------------------------------


def test_second_node_runs_followers_only(tiny_llama: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = SMALL | {"model_path": str(tiny_llama), "tp_size": 2, "nnodes": 2, "dist_init_addr": address}
    engines: list[Engine] = []
    thread = threading.Thread(target=lambda: engines.append(Engine(**settings, node_rank=1)))
    thread.start()
    with Engine(**settings, node_rank=0) as first:
        thread.join(timeout=60)
        (second,) = engines
        with second:
            with pytest.raises(Exception, match="node 1 of 2"):
                second.generate("hi")
            assert first.generate("hi", GREEDY)["meta_info"]["completion_tokens"] == 4
            first.shutdown()
            ended = threading.Thread(target=_ignore(second.wait))
            ended.start()
            ended.join(timeout=30)
            assert not ended.is_alive(), "the follower outlived its first node"


def _ignore(call: Callable[[], None]) -> Callable[[], None]:
    def quiet() -> None:
        with contextlib.suppress(ServerDiedError):
            call()

    return quiet


# -- HTTP over a live engine ----------------------------------------------------------------------------------


class Served:
    """An in-process engine whose HTTP server starts when the test calls `start_thread`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.args = engine.server_args.replace(port=free_port())
        self.updates = 0
        self.message = "updated to default."
        self.thread: threading.Thread | None = None

    def start_thread(self) -> None:
        reader, writer = Pipe(duplex=False)
        arguments = (self.engine.tokenizer_manager, self.engine.scheduler_info, self.args, writer)
        self.thread = threading.Thread(target=launch_server_from_verl_engine, args=arguments, daemon=True)
        self.thread.start()
        assert reader.poll(30) and reader.recv() == "ready"

    def update(self) -> None:
        """Update a weight from the thread that owns the engine, and check that the server holds the new value."""
        self.updates += 1
        value = torch.full((64,), float(self.updates))
        began = time.monotonic()
        done, self.message = self.engine.update_weights_from_tensor([("model.norm.weight", value)], partial=True)
        assert done
        assert time.monotonic() - began < 5
        assert self.engine.get_weights_by_name("model.norm.weight", 2) == [self.updates] * 2

    def http(self) -> None:
        assert f"updated to {http_generate(self.args.url)['meta_info']['weight_version']}." in self.message


@pytest.fixture
def served(tiny_llama: Path) -> Iterator[Served]:
    """An engine that no other test uses, because these tests depend on the order of the engine's first calls."""
    with Engine(model_path=str(tiny_llama), **SMALL) as engine:
        yield Served(engine)


@pytest.fixture(scope="module")
def shared_engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(model_path=str(tiny_llama), **SMALL) as engine:
        yield engine


@pytest.fixture
def also_served(shared_engine: Engine) -> Iterator[Served]:
    shared_engine.update_weight_version("default")
    served = Served(shared_engine)
    yield served
    if served.thread is not None:
        shared_engine.tokenizer_manager.stop_http()
        served.thread.join(timeout=10)
        assert not served.thread.is_alive()


def test_update_then_server_thread_then_update(served: Served) -> None:
    served.update()
    served.start_thread()
    served.update()
    served.http()
    served.update()


def test_server_thread_answers_first_then_main_updates(served: Served) -> None:
    served.start_thread()
    served.http()
    served.update()
    served.http()
    served.update()
    served.engine.shutdown()
    assert served.thread is not None
    served.thread.join(timeout=15)
    assert not served.thread.is_alive(), "the server outlived its engine"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{served.args.url}/health", timeout=2)


def test_update_generate_update(served: Served) -> None:
    served.start_thread()
    for _ in range(20):
        served.update()
        assert served.engine.generate("hi", GREEDY)["meta_info"]["weight_version"].startswith(f"{served.updates}@")
        served.http()


def test_updates_with_http_and_threads_in_flight(also_served: Served) -> None:
    also_served.start_thread()
    stop = threading.Event()
    errors: list[Exception] = []
    counts = [0, 0, 0]

    def keep(slot: int, call: Callable[[], Any]) -> None:
        try:
            while not stop.is_set():
                call()
                counts[slot] += 1
        except Exception as error:
            errors.append(error)

    calls: list[Callable[[], Any]] = [
        lambda: http_generate(also_served.args.url),
        lambda: also_served.engine.generate(input_ids=[5, 6], sampling_params=GREEDY),
        lambda: also_served.engine.generate("hi", GREEDY, stream=False),
    ]
    threads = [threading.Thread(target=keep, args=(i, call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        also_served.update()
    stop.set()
    for thread in threads:
        thread.join(timeout=20)
    assert not errors and all(counts)


_FORGETFUL = """
import sys, threading
from multiprocessing import Pipe
from verl_server import Engine, launch_server_from_verl_engine

engine = Engine(model_path=sys.argv[1], port=int(sys.argv[2]), kv_cache_gib=0.05, cpu_threads=1)
reader, writer = Pipe(duplex=False)
arguments = (engine.tokenizer_manager, engine.scheduler_info, engine.server_args, writer)
threading.Thread(target=launch_server_from_verl_engine, args=arguments).start()
assert reader.recv() == "ready"
print(engine.scheduler_info["pid"], flush=True)
"""


def test_program_that_forgets_to_shut_down_still_ends(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", _FORGETFUL, str(tiny_llama), str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert not Path(f"/proc/{int(ended.stdout)}").exists(), "the scheduler process outlived the program"


def test_server_over_a_paused_engine(also_served: Served) -> None:
    also_served.engine.pause_generation("in_place")
    also_served.start_thread()
    assert httpx.get(f"{also_served.args.url}/health").status_code == 200
    also_served.engine.continue_generation()
    also_served.http()
