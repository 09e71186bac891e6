"""Client processes that keep many streams of `/generate` open at once, on raw sockets.

A client counts the bytes that arrive and parses nothing but the end of a stream, so that it takes little processor time
beside a server or a router. The processor time of the clients is part of the result.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

_CONNECT_SECONDS = 30.0
_STREAM_SECONDS = 300.0
_END = b"0\r\n\r\n"
"""The last chunk of a chunked body. It cannot be inside of an event, whose JSON has no line break."""
_TAIL_BYTES = 16384
"""More than the last event of a stream has."""
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class StreamLoad:
    """The streams of one client process."""

    url: str
    bodies: list[bytes]
    """One JSON body for each stream."""
    start: float
    """Time at which the requests are sent, or later if a connection is not open by then. It is on the clock of
    `time.monotonic()`, which all processes of the host share."""


@dataclass(frozen=True)
class Received:
    """Result of the streams of one client process, or of all client processes."""

    tokens: int
    """Output tokens."""
    chunks: int
    """Number of times that data arrived."""
    nbytes: int
    start: float
    """Time at which the requests were sent, on the clock of `time.monotonic()`."""
    end: float
    """Time of the last byte."""
    cpu_share: float
    """Processor time of the busiest client process, as a share of the time that the streams took."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def run_streams(pool: ProcessPoolExecutor, clients: int, urls: Sequence[str], bodies: list[bytes]) -> Received:
    """Send all bodies at the same time, and return what was received when the last stream has ended.

    `pool` has at least `clients` processes, which take the addresses by turns. Raises RuntimeError if a stream does not
    end with the end of its answer.
    """
    start = time.monotonic() + 0.3 + len(bodies) / 300  # in which the clients connect
    parts = [part for i in range(clients) if (part := bodies[i::clients])]
    loads = [StreamLoad(urls[i % len(urls)], part, start) for i, part in enumerate(parts)]
    every = list(pool.map(run_client, loads))
    return Received(
        tokens=sum(each.tokens for each in every),
        chunks=sum(each.chunks for each in every),
        nbytes=sum(each.nbytes for each in every),
        start=min(each.start for each in every),
        end=max(each.end for each in every),
        cpu_share=max(each.cpu_share for each in every),
    )


def run_client(load: StreamLoad) -> Received:
    """Run the streams of one client process."""
    return uvloop.run(_client(load))


async def _client(load: StreamLoad) -> Received:
    address = urlsplit(load.url)
    host, port = str(address.hostname), int(address.port or 80)
    loop = asyncio.get_running_loop()
    heads = f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    async with asyncio.timeout(_CONNECT_SECONDS):
        opened = await asyncio.gather(*(loop.create_connection(_Stream, host, port) for _ in load.bodies))
    await asyncio.sleep(load.start - time.monotonic())
    start, cpu = time.monotonic(), time.process_time()
    streams = []
    for body, (transport, protocol) in zip(load.bodies, opened, strict=True):
        transport.write(f"{heads}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        streams.append(protocol)
    async with asyncio.timeout(_STREAM_SECONDS):
        tokens = await asyncio.gather(*(stream.tokens for stream in streams))
    end = time.monotonic()
    share = (time.process_time() - cpu) / (end - start)
    chunks, nbytes = sum(stream.chunks for stream in streams), sum(stream.nbytes for stream in streams)
    return Received(sum(tokens), chunks, nbytes, start, end, share)


class _Stream(asyncio.Protocol):
    """One connection with one request. It is closed at the end of the answer."""

    def __init__(self) -> None:
        self.tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The number of output tokens that the last event names."""
        self.chunks = 0
        self.nbytes = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.chunks and not data.startswith(b"HTTP/1.1 200 "):
            return self._fail(f"was answered {data[:400]!r}")
        self.chunks += 1
        self.nbytes += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_END):
            counts = _TOKENS.findall(self._tail)
            if not counts:
                return self._fail(f"ended with {self._tail[-400:]!r}")
            if not self.tokens.done():
                self.tokens.set_result(int(counts[-1]))
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"broke after {self.nbytes} bytes ({error}): {self._tail[-200:]!r}")

    def _fail(self, what: str) -> None:
        if not self.tokens.done():
            self.tokens.set_exception(RuntimeError(f"A stream {what}."))
