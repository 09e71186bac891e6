"""The proxy between an isolated program and its session, over its Unix socket. No sandbox is needed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientConnectionResetError, web

from verl_server.rollout.agents.uplink import MOST_CONNECTIONS, SESSION_REQUESTS, Traffic, uplink

_CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def _server(
    handle: Callable[[web.BaseRequest], Awaitable[Any]], port: int = 0, **options: Any
) -> AsyncIterator[int]:
    http = web.Server(handle, handler_cancellation=True, **options)
    server = await asyncio.get_running_loop().create_server(http, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await http.shutdown(1)


@contextlib.asynccontextmanager
async def _client(tmp_path: Path, url: str, wait: float = 0.0) -> AsyncIterator[tuple[httpx.AsyncClient, Traffic]]:
    path = tmp_path / ("x" * 60) / ("y" * 60) / "socket"  # longer than the address of a socket may be
    path.parent.mkdir(parents=True, exist_ok=True)
    async with uplink(path, url, SESSION_REQUESTS, wait) as traffic:
        short = tmp_path / "s"
        short.unlink(missing_ok=True)
        short.symlink_to(path)
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(short)), base_url="http://127.0.0.1:30000", timeout=20
        ) as client:
            yield client, traffic
    assert not path.exists()


def _run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())


def test_the_session_key_is_added_and_headers_of_callers_are_dropped(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        seen.append((request.raw_path, request.headers, await request.content.read()))
        return web.Response(text="ok", headers={"X-Kept": "yes"})

    async def main() -> None:
        async with _server(handle) as port, _client(tmp_path, f"http://127.0.0.1:{port}/prefix/s/KEY") as (client, _):
            dropped = {"X-Session-Child": "a", "Authorization": "b", "x-api-key": "c", "Idempotency-Key": "d"}
            answer = await client.post("/v1/messages?beta=true", content=b"{}", headers=dropped | {"x-kept": "e"})
            assert (answer.status_code, answer.text, answer.headers["x-kept"]) == (200, "ok", "yes")
            path, headers, body = seen[0]
            assert (path, body) == ("/prefix/s/KEY/v1/messages?beta=true", b"{}")
            assert headers["Host"] == f"127.0.0.1:{port}" and headers["X-Kept"] == "e"
            assert not set(dropped) & set(headers)

    _run(main())


def test_bodies_pass_as_they_are(tmp_path: Path) -> None:
    """The runner does not unpack what a program has packed: 1 MB would become 1 GB."""
    seen: list[tuple[str | None, bytes]] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        seen.append((request.headers.get("Content-Encoding"), await request.content.read()))
        return web.Response()

    async def serve() -> None:
        packed = gzip.compress(b"x" * 1_000_000)
        serving = _server(handle, auto_decompress=False)
        async with serving as port, _client(tmp_path, f"http://127.0.0.1:{port}/s/KEY") as (client, _):
            await client.post(_CHAT, content=packed, headers={"Content-Encoding": "gzip"})
        assert seen == [("gzip", packed)]

    _run(serve())


def test_events_arrive_as_the_server_sends_them(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await go.wait()  # until the client has read the first event
        await answer.write(b"data: 2\n\n")
        return answer

    async def main() -> None:
        async with _server(handle) as port, _client(tmp_path, f"http://127.0.0.1:{port}/s/K") as (client, traffic):
            async with client.stream("POST", _CHAT, content=b"{}") as answer:
                events = answer.aiter_raw()
                assert await anext(events) == b"data: 1\n\n"
                go.set()
                assert b"".join([part async for part in events]) == b"data: 2\n\n"
            assert (traffic.generations, traffic.last_status) == (1, 200)

    _run(main())


def test_the_end_of_the_last_generation_is_known(tmp_path: Path) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        what = (await request.content.read()).decode()
        if what == "lost":
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(b"x")
            assert request.transport is not None
            request.transport.abort()
            return answer
        if what == "closed":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=int(what) if what.isdigit() else 200, text=f"said {what}")

    async def main() -> None:
        async with _server(handle) as port, _client(tmp_path, f"http://127.0.0.1:{port}/s/K") as (client, traffic):
            for what, status in (("500", 500), ("400", 400), ("200", 200), ("closed", 503)):
                assert (await client.post(_CHAT, content=what.encode())).status_code == status
                assert traffic.last_status == (0 if what == "closed" else status)
                assert (traffic.last_error != "") == (status != 200)
            try:
                await client.post(_CHAT, content=b"lost")
                raise AssertionError("the answer is whole")
            except httpx.RemoteProtocolError:
                assert traffic.last_status == 0
            assert (await client.post("/v1/messages/count_tokens", content=b"200")).status_code == 200
            assert (traffic.last_status, traffic.generations, traffic.requests) == (0, 5, 6)

    _run(main())


@pytest.mark.parametrize("is_writing", [True, False])
def test_a_program_that_leaves_ends_its_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_writing: bool
) -> None:
    """The program closes its connection while the uplink writes to it, or waits for the server."""
    ended = asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer._payload_writer.write(b"1")  # type: ignore[union-attr]  # `write` itself is replaced
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return answer

    async def write(self: web.StreamResponse, data: bytes) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    async def main() -> None:
        async with _server(handle) as port, _client(tmp_path, f"http://127.0.0.1:{port}/s/K") as (client, traffic):
            if is_writing:
                monkeypatch.setattr(web.StreamResponse, "write", write)
            async with client.stream("POST", _CHAT, content=b"{}") as answer:
                async for part in answer.aiter_raw():
                    assert part == b"1" and not is_writing
                    break
            await ended.wait()
            assert (traffic.generations, traffic.last_status, traffic.last_error) == (1, 200, "")

    _run(main())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_server_that_is_away_is_tried_again_with_the_whole_body(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        sizes.append(len(await request.content.read()))
        return web.Response()

    async def main() -> None:
        async with _server(handle) as port:
            pass
        async with _client(tmp_path, f"http://127.0.0.1:{port}/s/K", wait=30.0) as (client, traffic):
            asking = asyncio.ensure_future(client.post(_CHAT, content=b"x" * 3_000_000))
            while not traffic.failed_connects:
                await asyncio.sleep(0.01)
            async with _server(handle, port):
                assert (await asking).status_code == 200
            assert sizes == [3_000_000] and traffic.last_status == 200

    _run(main())


def test_connections_beyond_the_bound_are_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with _client(tmp_path, "http://127.0.0.1:1/s/K") as (_, traffic):
            writers = [(await asyncio.open_unix_connection(tmp_path / "s"))[1] for _ in range(MOST_CONNECTIONS)]
            while traffic.refused == 0:
                reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
                writers.append(writer)
                await asyncio.sleep(0.01)
            assert await reader.read() == b""
            for one in writers:
                one.close()

    _run(main())


def test_other_requests_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with _client(tmp_path, "http://127.0.0.1:1/s/K") as (client, traffic):
            for method, path in (("GET", "/metrics"), ("GET", _CHAT), ("POST", "/generate"), ("POST", f"{_CHAT}/..")):
                answer = await client.request(method, path)
                assert answer.status_code == 404 and answer.json()["error"]["message"], (method, path)
            assert (await client.head("/")).status_code == 200
            assert (traffic.refused, traffic.requests) == (4, 0)

    _run(main())
