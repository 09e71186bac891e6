"""Servers that break at every point of an answer, clients that leave or do not read, and the router's own end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.fleet.fakes import FakeServer, run, running
from tests.fleet.raw import LAST_CHUNK, STREAM_HEAD, Call, RawServer, chunk, live, post, says_its_name, whole
from verl_server.fleet.members import State
from verl_server.fleet.upstream import UnreachableError

EVENT, NEXT = b'data: {"text":"a"}\n\n', b'data: {"text":"ab"}\n\n'
OK = "ok"


def breaks_after(data: bytes) -> Callable[[Call], Awaitable[None]]:
    async def behave(call: Call) -> None:
        if data:
            await call.send(data)
        call.writer.close()  # what was sent arrives, and then the end

    return behave


async def forever(call: Call) -> None:
    await call.client_left()


async def ask(url: str, path: str = "/generate", method: str = "POST", **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20, verify=False) as client:
        return await client.request(method, path, **options)


# -- servers that break ------------------------------------------------------------------------------------------

NOTHING = [b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", STREAM_HEAD]


@pytest.mark.parametrize("sent", NOTHING)
def test_a_request_that_got_nothing_is_answered_by_another_server(sent: bytes) -> None:
    async def main() -> None:
        first, second = RawServer(breaks_after(sent)), RawServer(breaks_after(sent))
        third = RawServer()
        async with live(first, second, third) as router:
            for _ in range(6):
                answer = await ask(router.url, json={"text": "a"})
                assert (answer.status_code, answer.text) == (200, f"127.0.0.1:{third.port}")
        assert first.calls and second.calls and {call.body for call in third.calls} == {b'{"text":"a"}'}

    run(main())


DIALECTS = {
    "/generate": b"",
    "/v1/completions": b"",
    "/v1/chat/completions": b"",
    "/v1/responses": b"event: x\n",
    "/v1/messages": b"event: x\n",
    "/inference/v1/generate": b"",
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("rest", [b"", NEXT[:9], NEXT[:-1]])
def test_a_stream_that_breaks_ends_with_an_error_behind_whole_events(path: str, rest: bytes) -> None:
    async def main() -> None:
        event = DIALECTS[path] + EVENT
        cut = chunk(event[:7]) + chunk(event[7:] + event + rest)
        broken, other = RawServer(breaks_after(STREAM_HEAD + cut)), RawServer(breaks_after(STREAM_HEAD + cut))
        async with live(broken, other) as router:
            answer = await ask(router.url, path, json={"stream": True})
        assert answer.status_code == 200 and len(broken.calls + other.calls) == 1, "it was not repeated"
        assert answer.content.startswith(event + event)
        last = answer.text[2 * len(event) :].removesuffix("\n\n").split("\n\n")
        if DIALECTS[path]:
            (error,) = last
            content = json.loads(error.removeprefix("event: error\ndata: "))
            assert content["type"] == "error" and "Repeat the request" in content["error"]["message"]
        else:
            error, done = last
            assert done == "data: [DONE]" and "Repeat the request" in json.loads(error[6:])["error"]["message"]

    run(main())


def test_another_answer_that_breaks_has_no_end() -> None:
    async def main() -> None:
        broken = RawServer(breaks_after(whole(bytes(1000))[:-1]))
        other = RawServer(breaks_after(whole(bytes(1000))[:-1]))
        async with live(broken, other) as router:
            with pytest.raises(httpx.RemoteProtocolError):
                await ask(router.url, json={})
        assert len(broken.calls + other.calls) == 1

    run(main())


def test_a_request_that_ends_servers_does_not_end_all_of_them() -> None:
    async def main() -> None:
        servers = [RawServer(breaks_after(b"")) for _ in range(5)]
        async with live(*servers) as router:
            answer = await ask(router.url, json={})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert sum(len(server.calls) for server in servers) == 3

    run(main())


@pytest.mark.parametrize(("path", "method"), [("/tokenize", "POST"), ("/sessions", "POST")])
def test_what_may_have_been_done_is_not_done_again(path: str, method: str) -> None:
    async def main() -> None:
        servers = [RawServer(breaks_after(b"")) for _ in range(2)]
        async with live(*servers) as router:
            answer = await ask(router.url, path, method, json={})
        assert answer.status_code == 503 and sum(len(server.calls) for server in servers) == 1

    run(main())


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 201 Created\r\nContent-Length: 26\r\n\r\n{"])
def test_a_session_whose_creation_broke_is_created_on_the_same_server_again(sent: bytes) -> None:
    """The server may have created it: on another one there would be two of this name."""

    async def main() -> None:
        async def creates(call: Call) -> None:
            if call.method == "GET":
                await call.send(whole(b"{}", b"404 Not Found"))
                return
            creations.append(call.headers["host"])
            if len(creations) == 1:
                server = next(server for server in servers if server.url.endswith(call.headers["host"]))
                await call.send(sent)
                server.stop()
                return
            await call.send(whole(b'{"id": "a", "key": "vs-a"}', b"201 Created"))

        creations: list[str] = []
        servers = [RawServer(creates) for _ in range(3)]
        async with live(*servers) as router:
            answer = await ask(router.url, "/sessions", json={"id": "a"})
            assert answer.status_code == 503
            again = asyncio.ensure_future(ask(router.url, "/sessions", json={"id": "a"}))
            (lost,) = [server for server in servers if server.url.endswith(creations[0])]
            await router.until(lambda: router.fleet.member(lost.url).state == State.DEAD)  # type: ignore[union-attr]
            assert not again.done()
            await lost.start()
            assert (await again).status_code == 201
        assert creations == [creations[0]] * 2

    run(main())


def test_answers_without_content_pass() -> None:
    async def main() -> None:
        async def behave(call: Call) -> None:
            if call.method == "HEAD":
                await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nX-Own: 1\r\n\r\n")
            else:
                await call.send(b"HTTP/1.1 204 No Content\r\nX-Own: 1\r\n\r\n")

        async with live(RawServer(behave)) as router:
            head = await ask(router.url, "/v1/models", "HEAD")
            assert (head.status_code, head.content, head.headers["x-own"]) == (200, b"", "1")
            assert head.headers["content-length"] == "12"
            empty = await ask(router.url, json={})
            assert (empty.status_code, empty.content, empty.headers["x-own"]) == (204, b"", "1")

    run(main())


def test_large_bodies_arrive_whole() -> None:
    async def main() -> None:
        async def echoes(call: Call) -> None:
            await call.send(whole(call.body))

        async with live(RawServer(echoes)) as router:
            body = bytes(range(256)) * 2**17
            assert (await ask(router.url, content=body)).content == body

    run(main())


def test_a_server_that_was_started_again_between_two_looks_serves_nothing() -> None:
    """It refuses by the run that the router names, so that no request is answered with weights that it loaded."""

    async def main() -> None:
        first, second = RawServer(), RawServer()
        async with live(first, second, probe_interval=60.0, hold_seconds=0.5) as router:
            first.instance, first.confirmed = "run2", False
            for _ in range(4):
                assert (await ask(router.url, json={})).text == f"127.0.0.1:{second.port}"
            second.instance, second.confirmed = "run3", False
            assert (await ask(router.url, json={})).status_code == 503
            await router.until_states(State.STALE, State.STALE)
            first.confirmed = True
            assert (await ask(router.url, "/fleet/commit", json={"weight_version": first.version})).status_code == 200
            assert (await ask(router.url, json={})).text == f"127.0.0.1:{first.port}"
        assert not [call for call in second.calls if call.headers["x-verl-expected-instance"] != "run1"]

    run(main())


# -- what is looked at -------------------------------------------------------------------------------------------


def test_requests_that_wait_cost_few_looks_and_no_attempts() -> None:
    async def main() -> None:
        async def behind(call: Call) -> None:
            error = b"X-Verl-Error: VersionBehindError\r\nRetry-After: 1\r\n"
            if call.headers.get("x-verl-min-weight-version") != server.version:
                await call.send(whole(b"{}", b"409 Conflict", error))
            else:
                await says_its_name(call)

        server = RawServer(behind)
        async with live(server, probe_interval=0.5) as router:
            demand = {"X-Verl-Min-Weight-Version": "2@00000001"}
            waiting = [asyncio.ensure_future(ask(router.url, json={}, headers=demand)) for _ in range(50)]
            await router.until(lambda: len(server.calls) == 50)
            looks, began = server.looks, asyncio.get_running_loop().time()
            await router.until(lambda: server.looks >= looks + 10)
            seconds = asyncio.get_running_loop().time() - began
            assert seconds > 0.5, "they look ten times a second, not all the time"
            assert len(server.calls) == 50, "nothing changed, so nobody asks again"
            server.version = "2@00000001"
            answers = await asyncio.gather(*waiting)
            assert {answer.status_code for answer in answers} == {200}

    run(main())


@pytest.mark.parametrize("named", [{}, {"session_params": {"id": "s1"}}], ids=["any server", "a session's server"])
def test_a_server_that_answers_looks_and_refuses_requests_is_not_stormed(named: dict[str, Any]) -> None:
    async def main() -> None:
        async with running(FakeServer(), hold_seconds=1.0) as fleet:
            fleet.router.sessions.may_have(fleet.servers[0].url, "s1")
            upstream, attempts = fleet.fleet.members[0].upstream, list[str]()
            send = upstream.send

            async def refusing(method: str, target: bytes, headers: Any, body: bytes) -> Any:
                if target != b"/generate":
                    return await send(method, target, headers, body)
                attempts.append(method)
                raise UnreachableError("it accepts no connection")

            upstream.send = refusing  # type: ignore[method-assign]
            answer = await fleet.post("/generate", {"text": "a"} | named)
            assert answer.status_code == 503 and 2 <= len(attempts) <= 12

    run(main())


def test_a_turn_waits_for_the_version_that_its_session_demands() -> None:
    """The router does not know the demand of a session. Its server refuses the turn by it."""

    async def main() -> None:
        async def behind(call: Call) -> None:
            if call.method == "POST" and server.version == "1@00000001":
                await call.send(whole(b"{}", b"409 Conflict", b"X-Verl-Error: VersionBehindError\r\n"))
            else:
                await says_its_name(call)

        server = RawServer(behind)
        async with live(server, RawServer()) as router:
            path = f"/s/vs-{'a' * 43}/v1/chat/completions"
            turns = [asyncio.ensure_future(ask(router.url, path, json={})) for _ in range(10)]
            await router.until(lambda: len([call for call in server.calls if call.method == "POST"]) == 10)
            looks = server.looks
            await router.until(lambda: server.looks > looks + 5)
            assert len([call for call in server.calls if call.method == "POST"]) == 10
            server.version = "2@00000001"
            assert {answer.status_code for answer in await asyncio.gather(*turns)} == {200}

    run(main())


def test_a_push_is_declared_while_an_older_look_is_under_way() -> None:
    async def main() -> None:
        async def slow() -> None:
            looking.set()
            await go_on.wait()

        looking, go_on = asyncio.Event(), asyncio.Event()
        server = RawServer()
        async with live(server) as router:
            server.look = slow
            await looking.wait()  # the answer of this look has the old version
            server.version, server.look = "2@00000001", None
            commit = asyncio.ensure_future(ask(router.url, "/fleet/commit", json={"weight_version": "2@00000001"}))
            await router.until(lambda: router.fleet.members[0].wake.is_set())
            go_on.set()
            assert (await commit).status_code == 200

    run(main())


def test_whatever_a_server_answers_it_is_looked_at_again() -> None:
    async def main() -> None:
        server = RawServer()
        async with live(server) as router:
            get = router.fleet._get

            async def fails(*_: Any) -> Any:
                raise KeyError("a bug")

            router.fleet._get = fails  # type: ignore[method-assign]
            await router.until_states(State.DEAD)
            router.fleet._get = get  # type: ignore[method-assign]
            await router.until_states(State.HEALTHY)

    run(main())


# -- clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", STREAM_HEAD, STREAM_HEAD + chunk(EVENT)])
def test_a_client_that_leaves_ends_the_request_at_the_server(sent: bytes) -> None:
    async def main() -> None:
        async def behave(call: Call) -> None:
            await call.send(sent)
            await call.client_left()
            left.set()

        left = asyncio.Event()
        server = RawServer(behave)
        async with live(server) as router:
            reader, writer = await router.connect(post("/generate"))
            await router.until(lambda: server.calls)
            if sent.endswith(chunk(EVENT)):
                await reader.readuntil(EVENT)
            writer.close()
            async with asyncio.timeout(2):
                await left.wait()
            await router.until(lambda: router.fleet.members[0].requests == 0)
            assert router.fleet.members[0].state == State.HEALTHY

    run(main())


def test_a_client_that_leaves_while_its_request_waits_is_forgotten() -> None:
    async def main() -> None:
        server = RawServer()
        async with live(server, probe_timeout=0.5) as router:
            server.stop()
            await router.until_states(State.DEAD)
            clients = [(await router.connect(post("/generate", bytes(2**20))))[1] for _ in range(20)]
            await router.until(lambda: router.fleet._waiting == 20)
            assert router.router._held == 20 * 2**20
            for writer in clients:
                writer.close()
            await router.until(lambda: router.fleet._waiting == 0 and router.router._held == 0, 2)
            await server.start()
            await router.until_states(State.HEALTHY)
            assert not server.calls

    run(main())


def test_a_client_that_does_not_read_stops_the_server() -> None:
    """Otherwise the router would keep the stream in its memory."""

    async def main() -> None:
        sent = 0
        event = b"data: " + bytes(65536).replace(b"\0", b"x") + b"\n\n"

        async def streams(call: Call) -> None:
            nonlocal sent
            await call.send(STREAM_HEAD)
            for _ in range(1024):
                await call.send(chunk(event))
                sent += 1
            await call.send(LAST_CHUNK)

        async with live(RawServer(streams)) as router:
            reader, writer = await router.connect(post("/generate"))
            await router.until(lambda: sent)
            assert router.router._held == 0, "the request is not repeated any more"
            before = -1
            while sent != before:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 512, "what the kernel buffers on both sides"
            total, data = 0, b""
            while not data.endswith(LAST_CHUNK):
                data = await reader.read(2**20)
                total += len(data)
            assert total > 1024 * len(event)
            writer.close()

    run(main())


def test_idle_connections_delay_nobody() -> None:
    async def main() -> None:
        async with live(RawServer()) as router:
            idle = [await router.connect(b"") for _ in range(400)]
            answers = await asyncio.gather(*(ask(router.url, json={}) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
            for _, writer in idle:
                writer.close()

    run(main())


# -- the end of the router ---------------------------------------------------------------------------------------


def test_the_router_ends_streams_that_outlast_its_end_with_an_error() -> None:
    async def main() -> None:
        async def short(call: Call) -> None:
            await call.send(STREAM_HEAD + chunk(EVENT))
            await stopping.wait()
            if call.body == b"long":
                await call.client_left()
            await call.send(chunk(NEXT) + LAST_CHUNK)

        stopping = asyncio.Event()
        server = RawServer(short)
        async with live(server, graceful=1) as router:
            streams = [await router.connect(post("/generate", body)) for body in (b"short", b"long")]
            for reader, _ in streams:
                await reader.readuntil(EVENT)
            demand = b"X-Verl-Min-Weight-Version: 9@00000001\r\n"
            server.behave = forever
            held, held_writer = await router.connect(post("/generate", b"{}", demand))
            silent, silent_writer = await router.connect(post("/generate"))
            await router.until(lambda: len(server.calls) >= 3)
            router.server.should_exit = True
            stopping.set()
            async with asyncio.timeout(10):
                short_rest, long_rest = [await reader.read() for reader, _ in streams]
                assert NEXT in short_rest and b"error" not in short_rest and short_rest.endswith(LAST_CHUNK)
                assert NEXT not in long_rest and b"The router ended" in long_rest and long_rest.endswith(LAST_CHUNK)
                assert (await silent.read()).startswith(b"HTTP/1.1 503")
                assert (await held.read()).startswith(b"HTTP/1.1 503")
                await router.serving
            for writer in (held_writer, silent_writer, *(writer for _, writer in streams)):
                writer.close()

    run(main())


def test_a_client_that_does_not_read_does_not_delay_the_end() -> None:
    async def main() -> None:
        async def streams(call: Call) -> None:
            await call.send(STREAM_HEAD)
            while True:
                await call.send(chunk(EVENT * 4096))

        server = RawServer(streams)
        async with live(server, graceful=1) as router:
            _, writer = await router.connect(post("/generate"))
            await router.until(lambda: router.server.server_state.tasks)
            await router.until(lambda: any(c.flow.write_paused for c in router.server.server_state.connections))
            tasks = list(router.server.server_state.tasks)
            for task in tasks:
                task.cancel()  # as the event loop does at its end
            assert not (await asyncio.wait(tasks, timeout=5))[1]
            writer.close()

    run(main())
