"""What `RolloutServers` does with servers that restart, stay away, or are pushed to by somebody else."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.fake_router import FakeRouter
from tests.engine.restartable_server import PARAMETERS, Server
from verl_server.engine import restarts as restarts_module
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.router_client import RouterClient
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import BadRequestError, ServerDiedError, ServerLaunchError, UpdateConflictError
from verl_server.train import servers as servers_module
from verl_server.train.ranks import all_ranks, attach_engine
from verl_server.train.servers import RolloutServers
from verl_server.train.stopping import RunStoppedError, StopRequest

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def pair(text_folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        pair = [Server(text_folder) for _ in range(2)]
        for server in pair:
            stack.callback(server.stop)
        yield pair


@pytest.fixture
def engines(pair: list[Server]) -> Iterator[list[VerlEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(attach_engine(server.url)) for server in pair]


def weights() -> Iterable[tuple[str, torch.Tensor]]:
    return ((f"w{i}", torch.ones(2)) for i in range(PARAMETERS))


def version(server: Server) -> str:
    with HttpServerEngineAdapter.attach(server.url) as client:
        return client.get_server_info()["weight_version"]


def test_a_push_reaches_all_servers(pair: list[Server], engines: list[VerlEngine]) -> None:
    RolloutServers(engines, all_ranks()).push(weights, "1@5f2c9a1e")
    assert [version(server) for server in pair] == ["1@5f2c9a1e"] * 2


def test_a_server_that_was_started_again_is_healed_by_the_push(pair: list[Server], engines: list[VerlEngine]) -> None:
    servers = RolloutServers(engines, all_ranks())
    servers.push(weights, "1@5f2c9a1e")
    pair[0].restart()
    servers.push(weights, "2@5f2c9a1e")
    assert [version(server) for server in pair] == ["2@5f2c9a1e"] * 2


def test_a_server_that_is_away_is_left_out_and_healed_when_it_is_back(
    pair: list[Server], engines: list[VerlEngine], caplog: pytest.LogCaptureFixture
) -> None:
    servers = RolloutServers(engines, all_ranks())
    servers.push(weights, "1@5f2c9a1e")
    pair[1].stop()
    with caplog.at_level(logging.WARNING):
        servers.push(weights, "2@5f2c9a1e")
    assert f"The server at {pair[1].url} is left out until it is back" in caplog.text
    assert version(pair[0]) == "2@5f2c9a1e"
    servers.ensure(weights)  # one has the weights: nobody waits
    pair[1].start()
    servers.push(weights, "3@5f2c9a1e")
    assert [version(server) for server in pair] == ["3@5f2c9a1e"] * 2


def test_the_last_server_is_waited_for(pair: list[Server], engines: list[VerlEngine]) -> None:
    servers = RolloutServers(engines[:1], all_ranks(), restart_timeout=30)
    servers.push(weights, "1@5f2c9a1e")
    pair[0].stop()
    back = threading.Timer(0.2, pair[0].start)
    back.start()
    servers.ensure(weights)
    back.join()
    assert version(pair[0]) == "1@5f2c9a1e"


def test_the_wait_has_a_bound(pair: list[Server], engines: list[VerlEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "_PROBE_SECONDS", 0.05)
    servers = RolloutServers(engines[:1], all_ranks(), restart_timeout=0.2)
    servers.push(weights, "1@5f2c9a1e")
    pair[0].stop()
    with pytest.raises(ServerDiedError, match=r"No rollout server was brought back within 0\.2 s"):
        servers.push(weights, "2@5f2c9a1e")


def test_weights_that_another_trainer_pushed_are_a_conflict(pair: list[Server], engines: list[VerlEngine]) -> None:
    """Two trainers that heal the same server in turn would never end."""
    servers = RolloutServers(engines, all_ranks())
    servers.push(weights, "1@5f2c9a1e")
    with HttpServerEngineAdapter.attach(pair[0].url) as other:
        other.update_weights_from_tensor(weights(), weight_version="1@0a0a0a0a")
    with pytest.raises(UpdateConflictError, match="serves version '1@0a0a0a0a', and this run pushed '1@5f2c9a1e'"):
        servers.ensure(weights)


def test_a_server_that_did_not_answer_for_a_moment_is_no_conflict(
    pair: list[Server], engines: list[VerlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = RolloutServers(engines[:1], all_ranks())
    servers.push(weights, "1@5f2c9a1e")
    monkeypatch.setattr(HttpServerEngineAdapter, "lost", lambda *_: "HTTP 503")
    servers.ensure(weights)
    assert version(pair[0]) == "1@5f2c9a1e"


def test_a_server_that_dies_before_it_is_healed_is_not_waited_for(
    pair: list[Server], engines: list[VerlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered, and is away again when the ranks have described their weights. The other server can play."""

    def sleep(_: float) -> None:
        raise AssertionError("it waits for the server")

    servers = RolloutServers(engines, all_ranks())
    pair[1].stop()
    monkeypatch.setattr(servers_module, "_silence", lambda _: None)
    monkeypatch.setattr(restarts_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    servers.push(weights, "1@5f2c9a1e")
    assert version(pair[0]) == "1@5f2c9a1e"


def test_a_router_is_told_of_each_push_and_waited_for(
    pair: list[Server], engines: list[VerlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "_PROBE_SECONDS", 0.05)
    router = FakeRouter(lambda: [server.url for server in pair])
    try:
        servers = RolloutServers(engines, all_ranks(), restart_timeout=30, router=RouterClient.at(router.url))
        servers.push(weights, "1@5f2c9a1e")
        assert router.committed == ["1@5f2c9a1e"]
        servers.ensure(weights)
        router.stop()
        back = threading.Timer(0.2, router.start)
        back.start()
        servers.ensure(weights)
        back.join()
        router.states |= {server.url: "stale" for server in pair}
        servers._restart_timeout = 0.2
        with pytest.raises(ServerDiedError, match=r"let no episode play for 0\.2 s \(--restart-timeout\).* is stale"):
            servers.ensure(weights)
    finally:
        router.stop()


@pytest.mark.parametrize(("has_pushed", "why"), [(False, "ended before the first push"), (True, "--max-relaunches")])
def test_why_a_server_is_not_launched_again(
    pair: list[Server], engines: list[VerlEngine], monkeypatch: pytest.MonkeyPatch, has_pushed: bool, why: str
) -> None:
    servers = RolloutServers(engines[:1], all_ranks(), max_relaunches=0)
    if has_pushed:
        servers.push(weights, "1@5f2c9a1e")
    monkeypatch.setattr(HttpServerEngineAdapter, "pid", 1)
    monkeypatch.setattr(HttpServerEngineAdapter, "exit_report", lambda _: "It ended with signal SIGKILL.")
    pair[0].stop()
    with pytest.raises(ServerLaunchError, match=f"ended with signal SIGKILL. It is not launched again.*{why}"):
        servers.push(weights, "2@5f2c9a1e")


def test_a_stop_interrupts_the_wait_for_the_exit_of_a_server(
    pair: list[Server], engines: list[VerlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequest()
    servers = RolloutServers(engines[:1], all_ranks(), stop=stop)
    servers.push(weights, "1@5f2c9a1e")
    monkeypatch.setattr(HttpServerEngineAdapter, "pid", 1)  # its process runs on
    pair[0].stop()
    with stop.installed():
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        monkeypatch.setattr(servers_module, "_PROBE_SECONDS", 600.0)
        previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            with pytest.raises(RunStoppedError):
                servers.push(weights, "2@5f2c9a1e")
        finally:
            signal.signal(signal.SIGALRM, previous)


def test_a_server_that_was_attached_is_not_launched_again(pair: list[Server]) -> None:
    with (
        HttpServerEngineAdapter.attach(pair[0].url) as client,
        pytest.raises(BadRequestError, match="was not launched by this engine"),
    ):
        client.relaunch()
