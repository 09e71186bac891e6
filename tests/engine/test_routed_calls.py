"""An engine over a router: each call reaches the servers that its table names, and errors say who did what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.engine.fake_router import FLEET, FakeRouter
from tests.engine.restartable_server import PARAMETERS, Server
from verl_server import HttpServerEngineAdapter, ServerRestartedError, WeightUpdateError
from verl_server.engine.http import RoutedEngine
from verl_server.engine.routed import RoutedCalls
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerUnavailableError,
    UnansweredError,
    UpdateConflictError,
)
from verl_server.messages import io_struct as io
from verl_server.messages.io_struct import ControlReply, QueuedReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)

TENSORS = [(f"w{i}", torch.ones(2)) for i in range(PARAMETERS)]
FOUR = {"max_new_tokens": 4}


@pytest.fixture
def servers(text_folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = [Server(text_folder) for _ in range(3)]
        for server in servers:
            stack.callback(server.stop)
        yield servers


@pytest.fixture
def router(servers: list[Server]) -> Iterator[FakeRouter]:
    router = FakeRouter(lambda: [server.url for server in servers])
    yield router
    router.stop()


@pytest.fixture
def engine(router: FakeRouter) -> Iterator[RoutedEngine]:
    with HttpServerEngineAdapter.attach(router.url) as engine:
        assert isinstance(engine, RoutedEngine)
        yield engine


def versions(servers: list[Server]) -> list[str]:
    return [server.stack.scheduler.version for server in servers]


def received(server: Server, kind: type) -> list[Any]:
    return [message for message in server.stack.scheduler.received if isinstance(message, kind)]


def refusing(server: Server, kind: type, status: int, message: str = "no") -> None:
    """Make a server refuse the requests of a kind."""
    answer = server.stack.scheduler.control

    def control(req: Any) -> ControlReply:
        if isinstance(req, kind):
            return ControlReply(id=req.id, success=False, message=message, status_code=status)
        return answer(req)  # type: ignore[no-any-return,misc]

    server.stack.scheduler.control = control


def test_the_table_names_each_control_request() -> None:
    assert set(RoutedCalls.WAYS) >= set(get_args(QueuedReq)) - {io.AcceptRestartReq}


def test_attach_recognizes_a_router_and_generates_through_it(router: FakeRouter, engine: RoutedEngine) -> None:
    assert engine.instance_id == FLEET
    assert engine.generate("a", FOUR)["text"]
    assert asyncio.run(engine.async_generate("a", FOUR))["text"]
    assert [path for _, path, _, _ in router.requests][-2:] == ["/generate", "/generate"]


def test_a_push_reaches_each_server_under_one_label(
    servers: list[Server], engine: RoutedEngine, router: FakeRouter
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version="1@5f2c9a1e")
    assert versions(servers) == ["1@5f2c9a1e"] * 3
    assert router.committed == ["1@5f2c9a1e"], "the router need not wait until it sees the version"
    engine.update_weights_from_tensor(TENSORS)
    (own,) = set(versions(servers))
    assert own != "1@5f2c9a1e", "a push without a label has one of its own, the same on all servers"
    engine.update_weights_from_tensor(TENSORS)
    assert len({own, *versions(servers)}) == 2
    assert [server.weights.sources for server in servers] == [["description", "description", "registration"]] * 3


def test_a_server_that_joined_gets_the_next_push_with_its_description(
    servers: list[Server], engine: RoutedEngine, text_folder: Path
) -> None:
    engine.register_weights(TENSORS)
    engine.push_weights(1)
    joined = Server(text_folder)
    servers.append(joined)
    try:
        engine.push_weights(2)
        assert versions(servers) == ["2"] * 4
        assert [server.weights.sources for server in servers] == [["registration"] * 2] * 3 + [["description"]]
    finally:
        joined.stop()


def test_a_server_that_is_away_is_left_out_with_one_warning(
    servers: list[Server], engine: RoutedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version="1")
    servers[1].stop()
    with caplog.at_level(logging.WARNING):
        for version in ("2", "3"):
            engine.update_weights_from_tensor(TENSORS, weight_version=version)
    assert caplog.text.count(f"leaves out the server at {servers[1].url}") == 1
    servers[1].start()
    engine.update_weights_from_tensor(TENSORS, weight_version="4")
    assert versions(servers) == ["4"] * 3
    with HttpServerEngineAdapter.attach(servers[1].url) as direct:
        assert direct.get_server_info()["weights_confirmed"], "a push of all parameters heals the new run"


def test_a_partial_push_heals_no_server(servers: list[Server], engine: RoutedEngine) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version="1")
    servers[1].restart()
    engine.update_weights_from_tensor(TENSORS[:1], weight_version="2", partial=True)
    assert versions(servers)[0] == versions(servers)[2] == "2" and not servers[1].weights.sources
    engine.heal(TENSORS, version="2")
    assert versions(servers) == ["2"] * 3
    assert [len(server.weights.sources) for server in servers] == [2, 1, 2], "two of them had version 2"


def test_heal_waits_for_a_server_only_if_all_are_away(servers: list[Server], engine: RoutedEngine) -> None:
    engine.update_weights_from_disk("/weights", weight_version="1")
    for server in servers:
        server.stop()
    with pytest.raises(ServerDiedError, match="none of the 3 servers takes part"):
        engine.heal(timeout=0.0)
    servers[2].start()
    assert engine.heal(timeout=30.0)[0]
    assert servers[2].weights.sources == ["/weights"]


def test_a_refusal_of_all_servers_is_their_error(servers: list[Server], engine: RoutedEngine) -> None:
    with pytest.raises(WeightUpdateError, match=r"^it misses parameters"):
        engine.update_weights_from_tensor(TENSORS[:1])


@pytest.mark.parametrize("status", [400, 409])
def test_a_refusal_of_one_server_names_who_has_what(servers: list[Server], engine: RoutedEngine, status: int) -> None:
    engine.update_weights_from_tensor(TENSORS, weight_version="1")
    refusing(servers[1], UpdateWeightsFromTensorReq, status)
    with pytest.raises(WeightUpdateError) as raised:
        engine.update_weights_from_tensor(TENSORS, weight_version="2")
    assert isinstance(raised.value, UpdateConflictError) == (status == 409)
    text = str(raised.value)
    assert f"{servers[1].url} (version '1') failed: no" in text
    assert f"{servers[0].url} (version '2') has carried it out" in text
    servers[1].stack.scheduler.control = servers[1].weights
    engine.update_weights_from_tensor(TENSORS, weight_version="3")
    assert versions(servers) == ["3"] * 3


def test_a_server_that_does_not_answer_leaves_the_outcome_open(
    servers: list[Server], engine: RoutedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still read the trainer's memory, so it is no server that can be left out."""
    send = HttpServerEngineAdapter.send_update

    def silent(self: HttpServerEngineAdapter, *args: Any) -> Any:
        if self.url == servers[1].url:
            raise UnansweredError("silence")
        return send(self, *args)

    monkeypatch.setattr(HttpServerEngineAdapter, "send_update", silent)
    with pytest.raises(UnansweredError, match="silence"):
        engine.update_weights_from_tensor(TENSORS, weight_version="1")


def test_an_error_is_raised_if_no_server_got_the_weights(servers: list[Server], engine: RoutedEngine) -> None:
    for server in servers:
        server.stop()
    with pytest.raises(ServerDiedError, match="The push: none of the 3 servers takes part"):
        engine.update_weights_from_tensor(TENSORS)


def test_a_push_needs_no_router(servers: list[Server], engine: RoutedEngine, router: FakeRouter) -> None:
    """A router that died is started again later, and finds the new version on its servers."""
    router.stop()
    engine.update_weights_from_tensor(TENSORS, weight_version="1")
    assert versions(servers) == ["1"] * 3
    router.start()
    assert engine.generate("a", FOUR)


def test_a_retired_server_gets_nothing(servers: list[Server], engine: RoutedEngine, router: FakeRouter) -> None:
    router.states[servers[0].url] = "retired"
    engine.update_weights_from_tensor(TENSORS, weight_version="1")
    assert versions(servers)[1:] == ["1"] * 2 and not servers[0].weights.sources


def test_a_transaction_makes_one_version_of_all_servers(servers: list[Server], engine: RoutedEngine) -> None:
    engine.begin_weight_update("t")
    engine.update_weights_from_tensor(TENSORS)
    engine.end_weight_update(weight_version="1")
    for server in servers:
        (begin,), (end,) = received(server, BeginWeightUpdateReq), received(server, EndWeightUpdateReq)
        assert (begin.transaction_id, end.transaction_id, end.weight_version, end.discard) == ("t", "t", "1", False)


def test_an_error_of_one_server_discards_the_transaction_on_all(servers: list[Server], engine: RoutedEngine) -> None:
    engine.begin_weight_update("t")
    refusing(servers[1], UpdateWeightsFromTensorReq, 400)
    with pytest.raises(WeightUpdateError, match="failed: no") as raised:
        engine.update_weights_from_tensor(TENSORS)
    assert raised.value.__notes__ == ["The transaction was discarded on all servers."]
    assert [[end.discard for end in received(server, EndWeightUpdateReq)] for server in servers] == [[True]] * 3
    servers[1].stack.scheduler.control = servers[1].weights
    engine.update_weights_from_tensor(TENSORS, weight_version="2")
    assert versions(servers) == ["2"] * 3, "the engine has left the transaction"


def test_a_refusal_of_all_servers_keeps_the_transaction_open(servers: list[Server], engine: RoutedEngine) -> None:
    engine.begin_weight_update("t")
    for server in servers:
        refusing(server, EndWeightUpdateReq, 400, "parameters are missing")
    with pytest.raises(WeightUpdateError, match=r"^parameters are missing"):
        engine.end_weight_update()
    for server in servers:
        server.stack.scheduler.control = server.weights
    engine.end_weight_update(weight_version="1")
    assert [received(server, EndWeightUpdateReq)[-1].transaction_id for server in servers] == ["t"] * 3


def test_a_transaction_begins_on_all_servers_or_on_none(servers: list[Server], engine: RoutedEngine) -> None:
    refusing(servers[2], BeginWeightUpdateReq, 409, "another transaction is open")
    with pytest.raises(UpdateConflictError, match="another transaction is open"):
        engine.begin_weight_update("t")
    assert [len(received(server, EndWeightUpdateReq)) for server in servers] == [1, 1, 0]


def test_a_server_that_misses_a_call_of_a_transaction_is_left_out_of_it(
    servers: list[Server], engine: RoutedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights would be incomplete at the end. The transaction on it ends with its lease."""
    send = HttpServerEngineAdapter.send_update

    def away(self: HttpServerEngineAdapter, *args: Any) -> Any:
        if self.url == servers[1].url:
            raise ServerUnavailableError("not now")
        return send(self, *args)

    engine.begin_weight_update("t")
    monkeypatch.setattr(HttpServerEngineAdapter, "send_update", away)
    engine.update_weights_from_tensor(TENSORS)
    monkeypatch.undo()
    engine.update_weights_from_tensor(TENSORS)
    engine.end_weight_update(weight_version="2")
    assert [len(received(server, UpdateWeightsFromTensorReq)) for server in servers] == [2, 0, 2]
    assert [len(received(server, EndWeightUpdateReq)) for server in servers] == [1, 0, 1]


def test_a_transaction_that_no_server_has_any_more_is_left(servers: list[Server], engine: RoutedEngine) -> None:
    engine.begin_weight_update("t")
    for server in servers:
        server.restart()
    with pytest.raises(ServerRestartedError):
        engine.update_weights_from_tensor(TENSORS)
    engine.update_weights_from_tensor(TENSORS, weight_version="2")
    assert versions(servers) == ["2"] * 3


def test_pauses_and_releases_reach_all_servers(servers: list[Server], engine: RoutedEngine) -> None:
    engine.pause_generation("in_place")
    engine.continue_generation()
    assert engine.flush_cache()
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation(["kv_cache"])
    engine.update_weight_version("a label")
    for server in servers:
        assert [req.mode for req in received(server, io.PauseGenerationReq)] == ["in_place"]
        for kind in (io.ContinueGenerationReq, io.FlushCacheReq, UpdateWeightVersionReq):
            assert len(received(server, kind)) == 1, kind
        for kind in (ReleaseMemoryOccupationReq, ResumeMemoryOccupationReq):
            assert [req.tags for req in received(server, kind)] == [["kv_cache"]], kind


def test_checksums_that_differ_are_an_error(servers: list[Server], engine: RoutedEngine) -> None:
    for server, digest in zip(servers, ("a", "a", "b"), strict=True):
        server.stack.scheduler.control = lambda req, digest=digest: ControlReply(
            id=req.id, success=True, payload={"0": digest}
        )
    with pytest.raises(WeightUpdateError, match=f"the checksums of {servers[2].url} are not those of {servers[0].url}"):
        engine.weights_checker("checksum")
    servers[2].stop()
    assert engine.weights_checker("checksum")["0"] == "a"


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.init_weights_update_group("127.0.0.1", 1, 1, 2),
        lambda e: e.destroy_weights_update_group(),
        lambda e: e.update_weights_from_distributed([], [], []),
        lambda e: e.start_profile("/tmp"),
        lambda e: e.relaunch(),
    ],
)
def test_calls_that_need_one_server_are_refused_by_name(engine: RoutedEngine, call: Any) -> None:
    with pytest.raises(BadRequestError, match=r"over a router|not launched by this engine"):
        call(engine)


def test_an_engine_is_attached_while_all_servers_are_stale(servers: list[Server], router: FakeRouter) -> None:
    """A trainer that was resumed must heal servers to which no request goes."""
    for server in servers:
        router.states[server.url] = "stale"
    with HttpServerEngineAdapter.attach(router.url) as engine:
        engine.heal(TENSORS, version="1")
    assert versions(servers) == ["1"] * 3


def test_lost_and_the_wait_for_a_healthy_server(
    servers: list[Server], router: FakeRouter, engine: RoutedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.engine.routed._REPORT_SECONDS", 0.0)
    engine.update_weights_from_tensor(TENSORS, weight_version="1@5f2c9a1e")
    assert engine.lost() is engine.lost("1@5f2c9a1e") is engine.lost(">=1@5f2c9a1e") is None
    assert "no server for version '2@5f2c9a1e'" in str(engine.lost("2@5f2c9a1e"))
    with pytest.raises(ServerRestartedError, match="No server was healed within 0 s"):
        asyncio.run(engine.async_wait_until_healed(0.0, "2@5f2c9a1e"))
    for server in servers:
        router.states[server.url] = "stale"
    assert "no server for requests" in str(engine.lost())
    with pytest.raises(ServerUnavailableError):
        engine.generate("a", FOUR)
    router.stop()
    assert "failed" in str(engine.lost())


def test_the_end_of_the_engine_closes_its_memory_on_all_servers(servers: list[Server], router: FakeRouter) -> None:
    with HttpServerEngineAdapter.attach(router.url) as engine:
        engine.register_weights(TENSORS)
    assert [len(received(server, UnregisterWeightsReq)) for server in servers] == [1] * 3
