"""An engine that cannot start, or dies: a clear error within bounds, and no process is left. For the other engines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import fork_server
from tests.backends.conftest import OTHERS
from tests.backends.served import ENGINES, PROMPT, Served
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter, ServerDiedError, ServerUnavailableError, VerlServerError, errors
from verl_server.errors import ServerLaunchError

PROCESSES = {
    "vllm": ["VLLM::Worker", "VLLM::EngineCore", "backends.vllm.main"],
    "sglang": ["sglang::scheduler", "backends.sglang.main"],
}
"""Parts of the names of an engine's processes. The first one computes."""
REFUSED_ARGUMENTS = {"vllm": {"worker_cls": "mine"}, "sglang": {"pp_size": 2}}


@pytest.fixture(params=OTHERS)
def mortal(request: pytest.FixtureRequest, folders: dict[str, list[Path]]) -> Iterator[Served]:
    """A server of one test, which may kill it."""
    with fork_server.real_processes():
        adapter = HttpServerEngineAdapter(model_path=str(folders["qwen3"][0]), **ENGINES[request.param])
    try:
        yield Served(adapter, request.param, folders["qwen3"])
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


@pytest.mark.parametrize(
    ("mortal", "part"), [(engine, part) for engine in OTHERS for part in PROCESSES[engine]], indirect=["mortal"]
)
def test_the_death_of_a_process_ends_running_requests(mortal: Served, part: str) -> None:
    server = mortal.adapter.pid
    assert server is not None
    pids = descendants(server)
    with ThreadPoolExecutor(1) as pool:
        running = mortal.begin(pool, tokens=3000)
        killed = time.monotonic()
        os.kill(named(pids, part), signal.SIGKILL)
        with pytest.raises(VerlServerError) as raised:
            running.result(60)
    assert time.monotonic() - killed < 20  # 5 s on a machine that has nothing else to do
    assert isinstance(raised.value, (ServerDiedError, ServerUnavailableError)), raised.value
    assert f"{mortal.engine} ended with" in str(raised.value)
    assert eventually(lambda: not alive(pids), 20), alive(pids)


def test_a_death_in_the_middle_of_a_push(mortal: Served) -> None:
    server = mortal.adapter.pid
    assert server is not None
    pids = descendants(server)

    def push_for_ever() -> None:
        while True:
            mortal.push(1)

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push_for_ever)
        assert eventually(lambda: len(mortal._judge.versions) > 5, 60)
        os.kill(named(pids, PROCESSES[mortal.engine][0]), signal.SIGKILL)
        with pytest.raises(errors.VerlServerError):
            pushing.result(60)
    assert eventually(lambda: not alive(pids), 20), alive(pids)


def test_nothing_outlives_the_server(mortal: Served) -> None:
    server = mortal.adapter.pid
    assert server is not None
    pids = descendants(server)
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not alive(pids), 20), alive(pids)
    with pytest.raises(ServerDiedError):
        mortal.generate(PROMPT, tokens=2)


@pytest.mark.parametrize("fault", ["unknown argument", "refused argument", "unknown model"])
@pytest.mark.parametrize("engine", OTHERS)
def test_an_engine_that_cannot_start(tmp_path: Path, folders: dict[str, list[Path]], engine: str, fault: str) -> None:
    for file in folders["qwen3"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    engine_args: dict[str, object] = {}
    match fault:
        case "unknown argument":
            engine_args, words = {"no_such_option": 1}, "no_such_option"
        case "refused argument":
            engine_args = REFUSED_ARGUMENTS[engine]
            (words,) = engine_args
        case _:
            config, words = tmp_path / "config.json", "nothing"
            text = config.read_text().replace("Qwen3ForCausalLM", "NothingForCausalLM")
            config.write_text(text.replace('"qwen3"', '"nothing"'))
    before = descendants(os.getpid())
    settings = dict(ENGINES[engine])
    settings["engine_args"] = settings.get("engine_args", {}) | engine_args
    with fork_server.real_processes(), pytest.raises((ServerLaunchError, errors.BadRequestError), match=words):
        HttpServerEngineAdapter(model_path=str(tmp_path), **settings)
    left = {pid: name for pid, name in descendants(os.getpid()).items() if pid not in before}
    assert eventually(lambda: not alive(left), 20), alive(left)
