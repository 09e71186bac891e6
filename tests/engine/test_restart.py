"""After a restart of the server, every call fails until the new run has been healed or accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.restartable_server import PARAMETERS, Server
from verl_server import (
    BadRequestError,
    HttpServerEngineAdapter,
    ServerRestartedError,
    VerlEngine,
    WeightUpdateError,
)
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq

FOUR = {"max_new_tokens": 4}


@pytest.fixture
def attach(server: Server) -> Iterator[Callable[..., HttpServerEngineAdapter]]:
    with ExitStack() as engines:
        yield lambda **keys: engines.enter_context(HttpServerEngineAdapter.attach(server.url, **keys))


@pytest.fixture
def engine(attach: Callable[[], HttpServerEngineAdapter]) -> HttpServerEngineAdapter:
    return attach()


TENSORS = [(f"w{i}", torch.ones(2)) for i in range(PARAMETERS)]


async def drain(engine: HttpServerEngineAdapter) -> None:
    async for _ in await engine.async_generate("a", FOUR, stream=True):
        pass


CALLS: dict[str, Callable[[HttpServerEngineAdapter], Any]] = {
    "generate": lambda e: e.generate("a", FOUR),
    "stream": lambda e: list(e.generate("a", FOUR, stream=True)),
    "async_generate": lambda e: asyncio.run(e.async_generate("a", FOUR)),
    "async stream": lambda e: asyncio.run(drain(e)),
    "update_weights_from_tensor": lambda e: e.update_weights_from_tensor(TENSORS),
    "register_weights": lambda e: e.register_weights(TENSORS),
    "update_weights_from_disk": lambda e: e.update_weights_from_disk("/weights"),
    "begin_weight_update": lambda e: e.begin_weight_update(),
    "pause_generation": lambda e: e.pause_generation(),
    "flush_cache": lambda e: e.flush_cache(),
    "abort_request": lambda e: e.abort_request(abort_all=True),
    "release_memory_occupation": lambda e: e.release_memory_occupation(),
    "get_server_info": lambda e: e.get_server_info(),
    "get_internal_state": lambda e: e.get_internal_state(),
    "get_model_info": lambda e: e.get_model_info(),
}


def test_no_call_takes_a_restarted_server_for_the_one_before(server: Server, engine: HttpServerEngineAdapter) -> None:
    """No call may use the restarted server, which does not hold the pushed weights."""
    engine.update_weights_from_tensor(TENSORS, weight_version="seven")
    for call in CALLS.values():
        call(engine)
    before = engine.instance_id
    server.restart()
    for name, call in CALLS.items():
        with pytest.raises(ServerRestartedError, match=rf"expects run {before} with weight version '.+'.*heal\(\)"):
            call(engine)
            raise AssertionError(f"{name} accepted the restarted server")
    assert not [m for m in server.stack.scheduler.received if not isinstance(m, io.GetInternalStateReq)]


def test_heal_pushes_what_was_registered_under_a_label_of_the_server(
    server: Server, engine: HttpServerEngineAdapter
) -> None:
    """The tensors may have changed since version 7 was pushed, so the label must not be 7."""
    engine.register_weights(TENSORS)
    engine.push_weights(7)
    server.restart()
    with pytest.raises(ServerRestartedError):
        engine.push_weights(8)
    assert engine.heal() == (True, "done")
    info = engine.get_server_info()
    assert (info["weights_confirmed"], info["instance_id"]) == (True, engine.instance_id)
    assert info["weight_version"] == server.weights.own_label
    engine.push_weights(8)
    assert server.weights.sources == ["description", "registration"], "the registration must be made again"
    assert engine.generate("a", FOUR)


def test_heal_takes_the_weights_that_are_passed_and_their_version(
    server: Server, engine: HttpServerEngineAdapter
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version="7")
    server.restart()
    with pytest.raises(BadRequestError, match=r"heal\(model.named_parameters\(\)\)"):
        engine.heal()
    with pytest.raises(ServerRestartedError):
        engine.generate("a", FOUR)
    engine.heal(TENSORS, version=8)
    assert engine.get_server_info()["weight_version"] == "8"


def test_heal_loads_the_folder_of_the_newest_update_again(server: Server, engine: HttpServerEngineAdapter) -> None:
    engine.update_weights_from_disk("/weights", weight_version="7")
    server.restart()
    engine.heal()
    assert server.weights.sources == ["/weights"]
    assert engine.get_server_info()["weight_version"] == server.weights.own_label


def test_a_push_that_misses_parameters_does_not_heal_unasked(server: Server, engine: HttpServerEngineAdapter) -> None:
    engine.register_weights(TENSORS[:3])
    engine.push_weights(7, partial=True)
    server.restart()
    with pytest.raises(WeightUpdateError, match="misses parameters"):
        engine.heal()
    with pytest.raises(ServerRestartedError):
        engine.generate("a", FOUR)
    engine.heal(partial=True)
    assert engine.get_server_info()["weights_confirmed"]


def test_a_server_that_is_started_again_during_a_heal_is_not_taken_for_healed(
    server: Server, engine: HttpServerEngineAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.register_weights(TENSORS)
    engine.push_weights(7)
    server.restart()
    push = engine.send_update

    def restart_first(*args: Any) -> Any:
        server.restart()
        return push(*args)

    monkeypatch.setattr(engine, "send_update", restart_first)
    with pytest.raises(ServerRestartedError):
        engine.heal()
    monkeypatch.undo()
    assert not server.weights.sources, "the run that answers must not have received a push"
    engine.heal()
    assert engine.generate("a", FOUR)


def test_an_accepted_restart(server: Server, attach: Callable[[], HttpServerEngineAdapter]) -> None:
    """Each of several engines decides for itself; for engines that wait, the owner's acceptance is enough."""
    owner, other = attach(), attach()
    server.restart()
    owner.accept_restart()
    assert owner.generate("a", FOUR)
    with pytest.raises(ServerRestartedError):
        other.generate("a", FOUR)
    asyncio.run(other.async_wait_until_healed(10))
    assert other.generate("a", FOUR)


def test_only_the_owner_may_accept_for_all(text_folder: Path) -> None:
    server = Server(text_folder)
    try:
        keys = {"api_key": "k", "admin_api_key": "a"}
        server.restart(**keys)
        plain = HttpServerEngineAdapter.attach(server.url, api_key="k")
        owner = HttpServerEngineAdapter.attach(server.url, **keys)
        server.restart(**keys)
        with pytest.raises(BadRequestError, match="admin_api_key"):
            plain.accept_restart()
        owner.accept_restart()
        plain.accept_restart()
        assert plain.generate("a", FOUR)
    finally:
        server.stop()


def test_who_waits_for_a_heal_waits_within_a_bound(server: Server, engine: HttpServerEngineAdapter) -> None:
    server.restart()
    with pytest.raises(ServerRestartedError, match=r"not healed within 0 s .*'default', which no engine has confirmed"):
        asyncio.run(engine.async_wait_until_healed(0))
    httpx.post(f"{server.url}/update_weights_from_disk", json={"model_path": "/weights"}).raise_for_status()
    asyncio.run(engine.async_wait_until_healed(0))
    assert engine.generate("a", FOUR), "another client has pushed all weights"


def test_every_response_names_the_run_and_unaware_clients_are_served(server: Server) -> None:
    ids = set()
    for path, body in (("/health", None), ("/generate", {"text": "a"}), ("/generate", {"nonsense": 1}), ("/no", None)):
        request = {"json": body} if body is not None else {}
        ids.add(
            httpx.request("GET" if body is None else "POST", server.url + path, **request).headers["X-Verl-Instance"]
        )
    assert ids == {server.stack.manager.instance_id}
    refused = httpx.get(f"{server.url}/health", headers={"X-Verl-Expected-Instance": "another"})
    assert (refused.status_code, refused.headers["X-Verl-Error"]) == (412, "ServerRestartedError")


def test_a_server_that_names_no_run_has_taken_over(server: Server, engine: HttpServerEngineAdapter) -> None:
    """Such a server is another product or an older version. It ignores the expected run, so its answer is discarded."""
    engine._instance.check(200, engine.instance_id)
    engine._instance.check(502, None)  # the answer of a proxy
    with pytest.raises(ServerRestartedError, match="its answer has no run id"):
        engine._instance.check(200, None)


def test_an_open_transaction_ends_with_its_run(server: Server, engine: HttpServerEngineAdapter) -> None:
    engine.begin_weight_update("t")
    server.restart()
    engine.accept_restart()
    engine.update_weights_from_tensor(TENSORS)
    (update,) = [m for m in server.stack.scheduler.received if isinstance(m, UpdateWeightsFromTensorReq)]
    assert update.transaction_id is None


def test_verl_engine_heals(server: Server) -> None:
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with VerlEngine(init_device_mesh("cpu", (1,)), server_url=server.url) as engine:
            engine.register_weights(TENSORS)
            engine.push_weights(7)
            server.restart()
            with pytest.raises(ServerRestartedError):
                engine.generate("a", FOUR)
            engine.heal(version=7)
            assert engine.get_server_info()["weight_version"] == "7"
            server.restart()
            engine.accept_restart()
            assert engine.generate("a", FOUR)
    finally:
        dist.destroy_process_group()
