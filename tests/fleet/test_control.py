"""Every control route of the servers reaches all of them, or is refused with what to do instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fleet.fakes import FakeServer, answered, refused, run, running
from verl_server.fleet import control
from verl_server.fleet.control import TO_ALL, aborts_all
from verl_server.fleet.operations import server_operations

CONTROL = [each for each in server_operations() if each.access == "control"]
NO_CONTROL = {"/abort_request", "/abort_requests"}
"""Routes that reach all servers, and for which any caller's key is sufficient."""


def test_every_control_route_is_in_one_class() -> None:
    names = {each.name for each in CONTROL}
    lora = {name for name in names if "lora" in name}
    assert len(names) > 40
    assert TO_ALL | set(control._REFUSED) | lora == names | NO_CONTROL
    assert not TO_ALL & set(control._REFUSED)
    assert NO_CONTROL <= TO_ALL and not lora & TO_ALL


def body_of(name: str) -> dict[str, Any]:
    return (
        {"weight_version": "v1", "model_path": "/m"} if name == "/update_weights_from_disk" else {"request_ids": ["x"]}
    )


def test_what_reaches_all_and_what_is_refused() -> None:
    async def scenario() -> None:
        servers = [FakeServer(confirmed=False) for _ in range(3)]
        async with running(*servers) as fleet:
            for operation in server_operations():
                if operation.access != "control" and operation.name not in TO_ALL:
                    continue
                for path in operation.paths:
                    for method in operation.methods:
                        for server in servers:
                            server.received.clear()
                        answer = await fleet.client.request(
                            method, path, content=json.dumps(body_of(operation.name)).encode()
                        )
                        case = (method, path, answer.text)
                        if operation.name in TO_ALL:
                            assert answer.status_code == 200, case
                            assert [server.paths for server in servers] == [[path]] * 3, case
                            assert len({server.received[0].body for server in servers}) == 1
                        else:
                            assert answer.status_code == 409 and all(each.url in answer.text for each in servers), case
                            assert not any(server.paths for server in servers), case

    run(scenario())


@pytest.mark.parametrize("state", ["dead", "starting"])
def test_servers_that_do_not_answer_are_left_out(state: str) -> None:
    async def scenario() -> None:
        servers = [FakeServer() for _ in range(3)]
        async with running(*servers) as fleet:
            if state == "dead":
                await servers[1].stop()
            else:
                servers[1].answers["/weight_version"] = refused(503, "the model is loading", "ServerUnavailableError")
            await fleet.until_states("healthy", state, "healthy")
            assert (await fleet.post("/pause_generation")).status_code == 200
            assert [server.paths for server in servers] == [["/pause_generation"], [], ["/pause_generation"]]

    run(scenario())


def test_no_server_answers() -> None:
    async def scenario() -> None:
        servers = [FakeServer()]
        async with running(*servers) as fleet:
            await servers[0].stop()
            await fleet.until_states("dead")
            answer = await fleet.post("/pause_generation")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"

    run(scenario())


def test_stale_and_retired_servers_are_reached() -> None:
    async def scenario() -> None:
        servers = [FakeServer(), FakeServer(), FakeServer(confirmed=False)]
        async with running(*servers) as fleet:
            fleet.fleet.retire(fleet.fleet.members[0], is_retired=True)
            await fleet.until_states("retired", "healthy", "stale")
            assert (await fleet.post("/abort_request", {"abort_all": True})).status_code == 200
            assert all(server.paths == ["/abort_request"] for server in servers)

    run(scenario())


FAILURES: dict[str, tuple[list[Any], int]] = {
    "all": ([answered({"success": True})] * 3, 200),
    "one refuses": ([answered({}), refused(400, "it is busy", "BadRequestError"), answered({})], 409),
    "all refuse alike": ([refused(400, "no such model", "BadRequestError")] * 3, 400),
    "all refuse": ([refused(400, "a", "X"), refused(503, "b", "X"), refused(409, "c", "X")], 409),
    "one breaks": ([answered({}), "stop", answered({})], 409),
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_the_answer_of_all(name: str) -> None:
    answers, status = FAILURES[name]

    async def scenario() -> None:
        servers = [FakeServer() for _ in range(3)]
        async with running(*servers, wait=False, probe_interval=60.0) as fleet:
            await fleet.until_states("healthy", "healthy", "healthy")
            for server, answer in zip(servers, answers, strict=True):
                if answer == "stop":
                    await server.stop()
                else:
                    server.answers["/flush_cache"] = answer
            found = await fleet.post("/flush_cache")
            assert found.status_code == status, found.text
            if status == 409:
                assert all(server.url in found.text for server in servers)
            else:
                assert found.content == answers[0][2]

    run(scenario())


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"weight_version": ""}', b'{"weight_version": null}', b"[", b"\xff", b"[" * 10**5]
)
def test_an_update_from_disk_needs_a_label(body: bytes) -> None:
    async def scenario() -> None:
        server = FakeServer()
        async with running(server) as fleet:
            answer = await fleet.post("/update_weights_from_disk", body)
            assert answer.status_code == 409 and "weight_version" in answer.text and not server.paths

    run(scenario())


def test_a_restart_is_accepted_through_the_router_before_the_first_push_only() -> None:
    async def scenario() -> None:
        servers = [FakeServer(confirmed=False, version="default") for _ in range(2)]
        async with running(*servers) as fleet:
            assert (await fleet.post("/accept_restart")).status_code == 200
            for server in servers:
                server.confirmed = True
            await fleet.fleet.look_now()
            answer = await fleet.post("/accept_restart")
            assert answer.status_code == 409 and servers[1].url in answer.text

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/abort_request", b"", False),
        ("/abort_request", b"[", False),
        ("/abort_request", b'{"abort_all": null}', False),
        ("/abort_request", b'{"abort_all": false, "abort_all": true}', True),
        ("/abort_request", b'{"abort_all": "x"}', True),
        ("/abort_requests", b"", True),
        ("/abort_requests", b'{"request_ids": null}', True),
        ("/generate", b'{"abort_all": true}', False),
    ],
)
def test_which_bodies_abort_the_requests_of_others(path: str, body: bytes, expected: bool) -> None:
    assert aborts_all(path, body) == expected
