"""An engine that cannot start, or dies: a clear error within bounds, and no process is left. Run with vLLM."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import fork_server
from tests.backends.served import ENGINES, PROMPT, Served
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter, ServerDiedError, ServerUnavailableError, VerlServerError, errors
from verl_server.errors import ServerLaunchError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def vllm(folders: dict[str, list[Path]]) -> Iterator[Served]:
    """A server of one test, which may kill it."""
    with fork_server.real_processes():
        adapter = HttpServerEngineAdapter(model_path=str(folders["qwen3"][0]), **ENGINES["vllm"])
    try:
        yield Served(adapter, "vllm", folders["qwen3"])
    finally:
        adapter.shutdown()


def descendants(pid: int) -> dict[int, str]:
    """Return the names of all descendants of a process by id."""
    found = {}
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # a child belongs to the thread that started it
    for child in [child for children in lists for child in children.read_text().split()]:
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        found |= descendants(int(child))
    return found


def alive(pids: dict[int, str]) -> list[str]:
    return [name for pid, name in pids.items() if _state(pid) not in ("Z", "")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def named(pids: dict[int, str], part: str) -> int:
    (pid,) = [pid for pid, name in pids.items() if part in name]
    return pid


@pytest.mark.parametrize("part", ["VLLM::Worker", "VLLM::EngineCore", "backends.vllm.main"])
def test_the_death_of_a_process_ends_running_requests(vllm: Served, part: str) -> None:
    server = vllm.adapter.pid
    assert server is not None
    pids = descendants(server)
    with ThreadPoolExecutor(1) as pool:
        running = vllm.begin(pool, tokens=3000)
        killed = time.monotonic()
        os.kill(named(pids, part), signal.SIGKILL)
        with pytest.raises(VerlServerError) as raised:
            running.result(60)
    assert time.monotonic() - killed < 20  # 5 s on a machine that has nothing else to do
    assert isinstance(raised.value, (ServerDiedError, ServerUnavailableError)), raised.value
    assert "vllm ended with" in str(raised.value)
    assert eventually(lambda: not alive(pids), 20), alive(pids)


def test_a_death_in_the_middle_of_a_push(vllm: Served) -> None:
    server = vllm.adapter.pid
    assert server is not None
    pids = descendants(server)

    def push_for_ever() -> None:
        while True:
            vllm.push(1)

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push_for_ever)
        assert eventually(lambda: len(vllm._judge.versions) > 5, 60)
        os.kill(named(pids, "VLLM::Worker"), signal.SIGKILL)
        with pytest.raises(errors.VerlServerError):
            pushing.result(60)
    assert eventually(lambda: not alive(pids), 20), alive(pids)


def test_nothing_outlives_the_server(vllm: Served) -> None:
    server = vllm.adapter.pid
    assert server is not None
    pids = descendants(server)
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not alive(pids), 20), alive(pids)
    with pytest.raises(ServerDiedError):
        vllm.generate(PROMPT, tokens=2)


def _replace(text: str) -> Callable[[str], str]:
    return lambda config: config.replace("Qwen3ForCausalLM", text).replace('"qwen3"', '"nothing"')


@pytest.mark.parametrize(
    ("engine_args", "edit", "words"),
    [
        ({"no_such_option": 1}, None, "no_such_option"),
        ({"worker_cls": "mine"}, None, "worker_cls"),
        ({}, _replace("NothingForCausalLM"), "nothing"),
    ],
    ids=["unknown argument", "refused argument", "unknown model"],
)
def test_an_engine_that_cannot_start(
    tmp_path: Path,
    folders: dict[str, list[Path]],
    engine_args: dict[str, object],
    edit: Callable[[str], str],
    words: str,
) -> None:
    for file in folders["qwen3"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if edit is not None:
        config = tmp_path / "config.json"
        config.write_text(edit(config.read_text()))
    before = descendants(os.getpid())
    settings = ENGINES["vllm"] | {"engine_args": {"enforce_eager": True} | engine_args}
    with fork_server.real_processes(), pytest.raises((ServerLaunchError, errors.BadRequestError), match=words):
        HttpServerEngineAdapter(model_path=str(tmp_path), **settings)
    left = {pid: name for pid, name in descendants(os.getpid()).items() if pid not in before}
    assert eventually(lambda: not alive(left), 20), alive(left)
