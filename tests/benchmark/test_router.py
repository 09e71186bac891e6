"""`benchmarks.router` measures the router of this project, and fails if a stream is short or a weight differs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import router, stream_load
from tests.benchmark.lines import figures

SMALL = ["--set", "cpu_threads=1", "--set", "kv_cache_gib=0.1"]


@pytest.mark.exhaustive
def test_one_server(capsys: pytest.CaptureFixture[str]) -> None:
    streams = ["--streams", "3", "--rounds", "1", "--output-len", "4"]
    router.main([*SMALL, "--servers", "1", "--requests", "3", "--long-prompt", "100", *streams])
    found = figures(capsys)
    assert found["added_latency_ms"]["prompt_tokens"] == 100 and found["added_latency_ms"]["front"] == "tcp-relay"
    assert found["latency_ms"]["value"] > 0
    assert found["streams_ratio"]["value"] > 0 and found["streams_ratio"]["goal"] == 0.97
    assert found["streams_run"]["bytes"] > 0 and 0 < found["streams_run"]["client_cpu_share"] < 2
    assert found["router_cpu_us"]["front"] == "router"


@pytest.mark.exhaustive
def test_two_servers(capsys: pytest.CaptureFixture[str]) -> None:
    streams = ["--streams", "2", "--rounds", "1", "--output-len", "4", "--pushes", "2"]
    router.main([*SMALL, "--parts", "scaling,agents,push", "--agents", "2", "--turns", "2", *streams])
    lines = figures(capsys)
    assert lines["scaling_ratio"]["value"] > 0 and lines["scaling_ratio"]["goal"] == pytest.approx(1.9)
    assert 0 < lines["agents_hits"]["value"] <= 1 and lines["agents_hits"]["hint"] is False
    assert lines["agents_hits_ratio"]["value"] > 0
    push = lines["push_seconds"]
    assert push["servers"] == 2 and push["source"] == "registered" and push["ratio"] > 0


def test_parts_that_need_two_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert router.parse_args(["--servers", "1"]).parts == ["latency", "streams"]
    assert router.parse_args([]).parts == list(router.PARTS)
    with pytest.raises(SystemExit):
        router.parse_args(["--servers", "1", "--parts", "latency,agents"])
    assert "agents: with --servers 1 the parts are latency, streams" in capsys.readouterr().err


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'2c\r\ndata: {"meta_info":{"completion_tokens":%d}}\n\n\r\n'


@pytest.fixture
def scripted() -> Iterator[Any]:
    """Start a server that answers each connection with the given parts. Call it with the parts for its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def serve(parts: list[bytes]) -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            for part in parts:
                writer.write(part)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield lambda parts: asyncio.run_coroutine_threadsafe(serve(parts), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def run(url: str, streams: int) -> stream_load.Received:
    with ThreadPoolExecutor(1) as pool:  # stands for the processes of the clients
        return stream_load.run_streams(pool, 1, [url], [b"{}"] * streams)  # type: ignore[arg-type]


def test_streams_are_counted_by_their_last_event(scripted: Any) -> None:
    whole = HEAD + EVENT % 4 + EVENT % 7 + b"0\r\n\r\n"
    received = run(scripted([whole[:60], whole[60:-3], whole[-3:]]), streams=3)
    assert received.tokens == 21 and received.nbytes == 3 * len(whole)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([HEAD, EVENT % 4], "broke after"),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n"], "was answered .*503"),
        ([HEAD + b"0\r\n\r\n"], "ended with"),
    ],
)
def test_a_stream_without_its_end_fails(scripted: Any, parts: list[bytes], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(scripted(parts), streams=2)
